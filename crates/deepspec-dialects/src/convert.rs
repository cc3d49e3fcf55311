//! The same drafter in another dialect.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use safetensors::Dtype;
use serde_json::{Map, Value};

use crate::fields::Fields;
use crate::kinds::{Engine, EngineLayout};
use crate::numbers::{cast, differing_rows};
use crate::rope::{Rope, rope};
use crate::shapes::{EMBED, HEAD, REBUILT, is_embed_or_head};
use crate::shards::{MAX_SHARD_BYTES, is_weights};
use crate::write::{Source, Written, write};
use crate::{Checkpoint, Dialect, DialectError, Drafter, Target, layouts};

const CONFIG: &str = "config.json";

/// A drafter ready to be written in its new dialect.
pub struct Converted<'a> {
    config: Map<String, Value>,
    tensors: Vec<Written<'a>>,
    /// Tensors of the checkpoint that the new dialect leaves to the target.
    pub dropped: Vec<String>,
    /// Tensors that came from the target.
    pub taken: Vec<String>,
    /// Largest file of weights that is written, in bytes.
    pub max_shard_bytes: usize,
}

/// Plans the drafter of `source` in the dialect `to`. `target` supplies what that dialect needs and vouches for what it
/// leaves out.
///
/// # Errors
/// [`DialectError::Refused`] with the reason where the drafter cannot or must not be said in `to`; any other error if the
/// checkpoint or the target is broken.
pub fn convert<'a>(
    source: &'a Checkpoint,
    to: Dialect,
    target: Option<&'a Target>,
) -> Result<Converted<'a>, DialectError> {
    let refused =
        |reason: String| DialectError::Refused { path: source.dir().to_path_buf(), to: to.name(), reason };
    let drafter = complete(source, target)?;
    if let Some(reason) = drafter.refusal(source.dialect(), to) {
        return Err(refused(reason));
    }
    source.check()?;
    if let Some(target) = target {
        target.check_fits(&drafter)?;
    }
    let Some(target) = target else {
        return without_target(source, to, &drafter)
            .ok_or_else(|| refused(why_target(source.dialect(), to, &drafter)));
    };
    let (mut tensors, mut dropped) = body(source, to);
    let mut taken = vec![];
    for (end, theirs) in [(EMBED, target.embed()), (HEAD, target.head())] {
        let own = source.find(end);
        // Speculators' own loader takes them from the target, and so do those of dialects without them.
        if own.is_some() && to != Dialect::Reference {
            compare(source, end, target, &theirs).map_err(|error| match error {
                Compared::Differs(reason) => refused(reason),
                Compared::Failed(error) => error,
            })?;
        }
        match own {
            Some((name, facts)) if to.has_embed_and_head() => {
                let shape = facts.shape.clone();
                let source = Source::Copy(source.tensors(), name);
                tensors.push(Written { name: end.into(), dtype: facts.dtype, shape, source });
            }
            Some((name, _)) => dropped.push(name),
            None if to.has_embed_and_head() => {
                tensors.push(from_target(target, &theirs, end, source.dtype())?);
                taken.push(end.to_string());
            }
            None => {}
        }
    }
    Ok(Converted {
        config: layouts::config(&drafter, to, Some(target), dtype_name(source.dtype())),
        tensors,
        dropped,
        taken,
        max_shard_bytes: MAX_SHARD_BYTES,
    })
}

/// Plans the drafter of `source` in the layout that `engine` loads. Embedding and head are left to the target.
///
/// # Errors
/// [`DialectError::Refused`] with the reason where the engine cannot run the drafter; any other error if the checkpoint or the target
/// is broken.
pub fn for_engine<'a>(
    source: &'a Checkpoint,
    engine: Engine,
    target: &'a Target,
) -> Result<Converted<'a>, DialectError> {
    let to = engine.title();
    let refused = |reason: String| DialectError::Refused { path: source.dir().to_path_buf(), to, reason };
    let drafter = complete(source, Some(target))?;
    let layout = drafter
        .refusal_anywhere()
        .map_or_else(|| drafter.kind.engine_layout(engine), Err)
        .map_err(refused)?;
    match layout {
        EngineLayout::Dialect(dialect) if dialect == source.dialect() => {
            Err(refused(format!("it loads the checkpoint as it is, in the layout of {dialect}")))
        }
        EngineLayout::Dialect(dialect) => convert(source, dialect, Some(target)),
        EngineLayout::Anchored => {
            source.check()?;
            let path = source.dir().join(CONFIG);
            let theta = match rope(&Fields::new(&path, &drafter.decoder))? {
                Rope::Plain(theta) => theta,
                Rope::Scaled(kind) => {
                    return Err(refused(format!(
                        "rotary embeddings that are scaled ({kind}) are read differently"
                    )));
                }
            };
            target.check_fits(&drafter)?;
            for (end, theirs) in [(EMBED, target.embed()), (HEAD, target.head())] {
                compare(source, end, target, &theirs).map_err(|error| match error {
                    Compared::Differs(reason) => refused(reason),
                    Compared::Failed(error) => error,
                })?;
            }
            let (mut tensors, mut dropped) = body(source, Dialect::Reference);
            dropped.extend([EMBED, HEAD].into_iter().filter_map(|end| Some(source.find(end)?.0)));
            let mut config =
                layouts::config(&drafter, Dialect::Reference, Some(target), dtype_name(source.dtype()));
            if source.find(MARKOV[0]).is_none() {
                // SGLang asks for such a head, and to the others it says that all slots draft: one of zeros changes nothing.
                let shape = vec![drafter.vocab_size as usize, ZERO_RANK];
                // Zeros are zeros in every type of floats.
                let width = if source.dtype() == Dtype::F32 { 4 } else { 2 };
                if !matches!(source.dtype(), Dtype::F32 | Dtype::F16 | Dtype::BF16) {
                    return Err(refused(format!("its weights are {:?}", source.dtype())));
                }
                for name in MARKOV {
                    let bytes = vec![0; width * shape.iter().product::<usize>()];
                    let source_of = Source::Bytes(bytes);
                    let written = Written {
                        name: name.into(),
                        dtype: source.dtype(),
                        shape: shape.clone(),
                        source: source_of,
                    };
                    tensors.push(written);
                }
                config.insert("markov_rank".into(), ZERO_RANK.into());
                config.insert("markov_head_type".into(), "vanilla".into());
            }
            layouts::for_engines(&mut config, theta);
            Ok(Converted { config, tensors, dropped, taken: vec![], max_shard_bytes: MAX_SHARD_BYTES })
        }
    }
}

/// The vanilla Markov head.
const MARKOV: [&str; 2] = ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"];
/// Rank of a Markov head of zeros: vLLM's products on CPUs fail with smaller ones.
const ZERO_RANK: usize = 16;

/// The drafter with what its config leaves to the target.
fn complete(source: &Checkpoint, target: Option<&Target>) -> Result<Drafter, DialectError> {
    let mut drafter = source.drafter().clone();
    drafter.num_target_layers = drafter.num_target_layers.or(target.map(Target::layers));
    Ok(drafter)
}

/// A conversion that has all it needs: into the reference, with both ends at hand.
fn without_target<'a>(source: &'a Checkpoint, to: Dialect, drafter: &Drafter) -> Option<Converted<'a>> {
    if to != Dialect::Reference || drafter.num_target_layers.is_none() {
        return None;
    }
    let (mut tensors, dropped) = body(source, to);
    for end in [EMBED, HEAD] {
        let (name, facts) = source.find(end)?;
        let shape = facts.shape.clone();
        tensors.push(Written {
            name: end.into(),
            dtype: facts.dtype,
            shape,
            source: Source::Copy(source.tensors(), name),
        });
    }
    let config = layouts::config(drafter, to, None, dtype_name(source.dtype()));
    Some(Converted { config, tensors, dropped, taken: vec![], max_shard_bytes: MAX_SHARD_BYTES })
}

fn why_target(from: Dialect, to: Dialect, drafter: &Drafter) -> String {
    let what = match to {
        Dialect::Reference if drafter.num_target_layers.is_none() => {
            "`num_target_layers` is not in config.json, and the target's layers have to be counted".into()
        }
        Dialect::Reference => format!("{to} holds embedding and head, which {from} leaves to the target"),
        Dialect::Speculators => format!("{to} names its verifier"),
        _ => format!("{to} leaves embedding and head to the target, which therefore has to be the same"),
    };
    format!("the target is needed: {what}; give it with --target")
}

/// Everything but the ends, under its new names; and the names of what is left behind.
fn body(source: &Checkpoint, to: Dialect) -> (Vec<Written<'_>>, Vec<String>) {
    let (mut tensors, mut dropped) = (vec![], vec![]);
    for (name, facts) in source.tensors().iter() {
        if is_embed_or_head(name) {
            continue;
        }
        if REBUILT.contains(&name) {
            dropped.push(name.to_string());
            continue;
        }
        let spelled = to.spelled(&source.dialect().canonical(name));
        let copy = Source::Copy(source.tensors(), name.into());
        tensors.push(Written { name: spelled, dtype: facts.dtype, shape: facts.shape.clone(), source: copy });
    }
    (tensors, dropped)
}

/// A tensor of the target as the drafter's own type.
fn from_target<'a>(
    target: &'a Target,
    theirs: &str,
    name: &str,
    dtype: Dtype,
) -> Result<Written<'a>, DialectError> {
    let tensors = target.tensors();
    let facts = tensors.get(theirs).ok_or_else(|| tensors.error(theirs, "missing in the target"))?;
    let (shape, from) = (facts.shape.clone(), facts.dtype);
    let source = if from == dtype {
        Source::Copy(tensors, theirs.into())
    } else {
        let bytes = cast(tensors.bytes(theirs)?, from, dtype);
        Source::Bytes(
            bytes.ok_or_else(|| tensors.error(theirs, format!("{from:?} cannot be read as {dtype:?}")))?,
        )
    };
    Ok(Written { name: name.into(), dtype, shape, source })
}

pub(crate) enum Compared {
    Differs(String),
    Failed(DialectError),
}

impl From<DialectError> for Compared {
    fn from(error: DialectError) -> Self {
        Self::Failed(error)
    }
}

/// Whether the checkpoint's end is the target's, byte for byte in the checkpoint's type.
pub(crate) fn compare(source: &Checkpoint, end: &str, target: &Target, theirs: &str) -> Result<(), Compared> {
    let Some((name, own)) = source.find(end) else { return Ok(()) };
    let other = target
        .tensors()
        .get(theirs)
        .ok_or_else(|| target.tensors().error(theirs, "missing in the target"))?;
    if own.shape != other.shape {
        return Err(Compared::Differs(format!(
            "`{end}` has shape {:?}, the target's {:?}",
            own.shape, other.shape
        )));
    }
    let there = cast(target.tensors().bytes(theirs)?, other.dtype, own.dtype)
        .ok_or_else(|| target.tensors().error(theirs, format!("{:?} cannot be compared", other.dtype)))?;
    let here = source.tensors().bytes(&name)?;
    let rows = own.shape.first().copied().unwrap_or(1);
    match differing_rows(&here, &there, here.len() / rows.max(1)) {
        0 => Ok(()),
        differing => Err(Compared::Differs(format!(
            "`{end}` is not the target's: {differing} of {rows} rows differ, and whoever loads the result takes the target's"
        ))),
    }
}

fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float32",
        Dtype::F16 => "float16",
        _ => "bfloat16",
    }
}

impl Converted<'_> {
    /// The new config.json.
    pub fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// Writes the folder aside and renames it into place. `overwrite` replaces a folder that holds a converted checkpoint and
    /// nothing else.
    ///
    /// # Errors
    /// If the folder exists and may not be replaced, or any I/O failure.
    pub fn write(mut self, dir: &Path, overwrite: bool) -> Result<(), DialectError> {
        let bad = |problem: String| DialectError::NotADrafter { path: dir.to_path_buf(), problem };
        if dir.exists() {
            if !overwrite {
                return Err(bad("exists already; --overwrite replaces it".into()));
            }
            if let Some(other) = foreign_file(dir)? {
                return Err(bad(format!(
                    "it holds {other} too and is not replaced; remove it, or choose another folder"
                )));
            }
        }
        if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            atomic::create_dir(parent)?;
        }
        let partial = beside(dir, ".partial");
        clear(&partial)?;
        atomic::create_dir(&partial)?;
        write(&partial, &mut self.tensors, self.max_shard_bytes)?;
        atomic::write_json(&partial.join(CONFIG), &self.config)?;
        let old = beside(dir, ".old");
        if dir.exists() {
            clear(&old)?;
            fs::rename(dir, &old).map_err(FileError::at("moving aside", dir))?;
        }
        fs::rename(&partial, dir).map_err(FileError::at("writing", dir))?;
        clear(&old)
    }
}

/// A file in the folder that no conversion writes.
fn foreign_file(dir: &Path) -> Result<Option<String>, DialectError> {
    let entries = fs::read_dir(dir).map_err(FileError::at("reading", dir))?;
    let names =
        entries.filter_map(|entry| entry.ok().map(|entry| entry.file_name().to_string_lossy().into_owned()));
    Ok(names.into_iter().find(|name| name != CONFIG && !is_weights(name)))
}

fn beside(dir: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = dir.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Removes what an earlier attempt left.
fn clear(dir: &Path) -> Result<(), DialectError> {
    if dir.exists() {
        fs::remove_dir_all(dir).map_err(FileError::at("removing", dir))?;
    }
    Ok(())
}
