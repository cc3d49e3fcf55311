//! Writes a drafter with a temperature folded into its confidence head.

use std::fs;
use std::path::Path;

use deepspec_core::usage;
use deepspec_models::{save, weights_digest};
use tch::{Kind, Tensor};

use crate::results::DrafterIdentity;

const WEIGHTS_FILE: &str = "model.safetensors";
/// Name prefix of the layer that computes the confidence logit w·x + b. Dividing w and b by t
/// divides the logit by the temperature t.
const CONFIDENCE_PROJECTION: &str = "confidence_head.proj.";

/// Checks that a temperature can be folded into the drafter, before anything is fitted.
///
/// # Errors
/// Usage errors: the drafter is missing, was replaced, or has its weights in several files; or `to`
/// exists.
pub fn check_can_fold(drafter: &DrafterIdentity, to: &Path) -> anyhow::Result<()> {
    let weights = Path::new(&drafter.path).join(WEIGHTS_FILE);
    if !weights.is_file() {
        usage!(
            "--write-folded: {} does not exist; the drafter of the run has to be there, with its weights in one file",
            weights.display()
        );
    }
    if weights_digest(Path::new(&drafter.path))? != drafter.weights_digest {
        usage!(
            "--write-folded: {} is another drafter than the run's by now; run the evaluation again",
            drafter.path
        );
    }
    if to.exists() {
        usage!("--write-folded: {} exists; name another folder", to.display());
    }
    Ok(())
}

/// Writes the drafter in `from` into the fresh folder `to`, its confidence logits divided by
/// `temperature`.
///
/// # Errors
/// Fails if the drafter has no confidence head or weights of several dtypes, and on I/O failures.
pub fn write_folded_drafter(from: &Path, to: &Path, temperature: f64) -> anyhow::Result<()> {
    let weights = from.join(WEIGHTS_FILE);
    let mut tensors = Tensor::read_safetensors(&weights)?;
    let kind = tensors
        .iter()
        .find(|(name, _)| name.starts_with(CONFIDENCE_PROJECTION))
        .map(|(_, tensor)| tensor.kind());
    let Some(kind) = kind else {
        usage!("--write-folded: {} has no {CONFIDENCE_PROJECTION}weight", weights.display())
    };
    if tensors.iter().any(|(_, tensor)| tensor.kind() != kind) {
        usage!("--write-folded: {} has weights of several kinds", weights.display());
    }
    for (_, tensor) in tensors.iter_mut().filter(|(name, _)| name.starts_with(CONFIDENCE_PROJECTION)) {
        *tensor = tensor.to_kind(Kind::Double) / temperature;
    }
    deepspec_core::atomic::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        if let Some(name) = path.file_name().filter(|name| path.is_file() && *name != WEIGHTS_FILE) {
            fs::copy(&path, to.join(name))?;
        }
    }
    // The weights are written last, so that a folder with weights is complete.
    Ok(save(&to.join(WEIGHTS_FILE), &tensors, kind)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folded_head_says_the_same_logits_divided_and_all_else_as_before() {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-dspark");
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("folded");
        write_folded_drafter(&from, &to, 1.6).unwrap();
        let read = |dir: &Path| Tensor::read_safetensors(dir.join(WEIGHTS_FILE)).unwrap();
        let [mut before, mut after] = [read(&from), read(&to)];
        before.sort_by(|a, b| a.0.cmp(&b.0));
        after.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(before.len(), after.len());
        for ((name, before), (same, after)) in before.iter().zip(&after) {
            assert_eq!((name, before.kind()), (same, after.kind()));
            if name.starts_with(CONFIDENCE_PROJECTION) {
                // The quotient is rounded to bfloat16, so that 8 bits are right.
                let off = (after.to_kind(Kind::Double) * 1.6 - before.to_kind(Kind::Double)).abs();
                let bound = before.to_kind(Kind::Double).abs() * 2f64.powi(-8);
                assert!(bool::try_from(off.le_tensor(&bound).all()).unwrap(), "{name}");
            } else {
                assert!(before.equal(after), "{name}");
            }
        }
        for file in fs::read_dir(&from).unwrap() {
            assert!(to.join(file.unwrap().file_name()).is_file());
        }
        assert!(
            write_folded_drafter(&repository_target(), &dir.path().join("none"), 1.6).is_err(),
            "no confidence head"
        );
    }

    fn repository_target() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-target")
    }
}
