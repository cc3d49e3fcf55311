//! The suites folder: files that are replaced only on request, and their record.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use crate::suites::record::{Origin, RECORD_FILE, Record, SuiteRecord};
use crate::suites::suite;
use anyhow::bail;
use deepspec_core::atomic::{self, FileError};
use deepspec_core::digest::{self, short_digest};

use crate::suites::convert::convert;
use crate::suites::fetch::Fetcher;
use crate::suites::plan::{RowSource, SuitePlan};

/// A folder to write suites to.
pub struct SuiteStore<'a> {
    dir: &'a Path,
    overwrite: bool,
}

/// The result of storing a suite.
pub struct StoreResult {
    /// The record of the suite.
    pub entry: SuiteRecord,
    /// Whether the file was written by this call.
    pub new: bool,
}

impl<'a> SuiteStore<'a> {
    /// Opens an existing folder.
    ///
    /// # Errors
    /// Fails if the folder has a record that cannot be read.
    pub fn open(dir: &'a Path, overwrite: bool) -> anyhow::Result<Self> {
        Record::read(dir)?;
        Ok(Self { dir, overwrite })
    }

    /// Makes sure that a suite is in the folder and recorded; fetches and converts it if necessary.
    /// Writes are atomic.
    ///
    /// # Errors
    /// Fails if the suite cannot be fetched, converted or written, or if a file of its name is
    /// another suite.
    pub fn ensure_stored(&self, plan: &SuitePlan, fetcher: &mut Fetcher) -> anyhow::Result<StoreResult> {
        let path = suite::suite_path(self.dir, &plan.name);
        let recorded = Record::read(self.dir)?.suites.remove(&plan.name);
        let there =
            if self.overwrite || !path.exists() { None } else { Some(digest::sha256_of_file(&path)?) };
        if let (Some(found), Some(entry)) = (&there, recorded) {
            check_stored(plan, &path, found, &entry)?;
            return Ok(StoreResult { entry, new: false });
        }
        let (files, origin) = fetcher.fetch(plan)?;
        tracing::debug!("converting {} of {}", plan.name, describe_origin(&origin));
        let converted = convert(&plan.conversion, &files)?;
        let entry = SuiteRecord {
            domain: plan.domain,
            rows: converted.rows,
            cap: plan.cap,
            source: origin,
            sha256: digest::sha256_of_bytes(converted.text.as_bytes()),
            converter: plan.converter.clone(),
        };
        // An unrecorded file may come from a run that stopped before it wrote the record.
        match &there {
            Some(found) if *found != entry.sha256 => bail!(
                "{} exists, is not recorded in {RECORD_FILE} and differs from what {} gives; --overwrite replaces it",
                path.display(),
                describe_origin(&entry.source)
            ),
            Some(_) => {}
            None => atomic::replace(&path, |file| file.write_all(converted.text.as_bytes()))?,
        }
        self.add_to_record(&plan.name, &entry)?;
        Ok(StoreResult { entry, new: there.is_none() })
    }

    /// Adds a suite to the record. A lock on the folder prevents concurrent runs from losing each
    /// other's entries.
    fn add_to_record(&self, name: &str, entry: &SuiteRecord) -> anyhow::Result<()> {
        let folder = File::open(self.dir).map_err(FileError::at("opening", self.dir))?;
        folder.lock().map_err(FileError::at("locking", self.dir))?;
        let mut record = Record::read(self.dir)?;
        record.suites.insert(name.into(), entry.clone());
        Ok(record.write(self.dir)?)
    }
}

/// Checks that the existing file matches the record and the plan.
fn check_stored(plan: &SuitePlan, path: &Path, found: &str, entry: &SuiteRecord) -> anyhow::Result<()> {
    let path = path.display();
    if found != entry.sha256 {
        let (found, recorded) = (short_digest(found), short_digest(&entry.sha256));
        bail!(
            "{path} was changed after it was written (sha256 {found}, recorded {recorded}); --overwrite replaces it"
        );
    }
    if entry.converter != plan.converter {
        let (was, is) = (&entry.converter, &plan.converter);
        bail!("{path} was made by another conversion (`{was}`, now `{is}`); --overwrite makes it again");
    }
    let same = match (&plan.source, &entry.source) {
        (RowSource::Hub { dataset, .. }, Origin::Hub { dataset: recorded, .. }) => dataset == recorded,
        (RowSource::Files(files), Origin::Files(recorded)) => {
            let digests =
                files.iter().map(|file| digest::sha256_of_file(file)).collect::<Result<Vec<_>, _>>()?;
            digests.iter().eq(recorded.iter().map(|file| &file.sha256))
        }
        _ => false,
    };
    if !same {
        bail!(
            "{path} was made from {}, not from what is asked for now; --overwrite makes it again",
            describe_origin(&entry.source)
        );
    }
    Ok(())
}

/// Human-readable origin of rows.
pub fn describe_origin(origin: &Origin) -> String {
    match origin {
        Origin::Hub { dataset, revision } => format!("{dataset}@{}", short_digest(revision)),
        Origin::Files(files) => {
            let names: Vec<String> = files.iter().map(|file| file.path.display().to_string()).collect();
            names.join(", ")
        }
    }
}
