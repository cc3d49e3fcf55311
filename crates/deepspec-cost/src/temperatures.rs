//! Reads temperature files: the output of `deepspec-eval calibrate`, and SGLang's STS files.

use std::fs;
use std::path::Path;

use serde::Deserialize;

/// Temperatures of a drafter's confidence logits, by position.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Temperatures {
    /// Temperatures t_1, t_2, …
    pub temperatures: Vec<f64>,
    /// Drafter of the temperatures, if the file names it.
    pub drafter: Option<CalibratedDrafter>,
}

/// The drafter that temperatures were fitted for.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct CalibratedDrafter {
    /// Folder of the drafter.
    pub path: String,
    /// Digest of the drafter's config.
    pub config_digest: String,
    /// Digest of the drafter's weights.
    pub weights_digest: String,
}

impl Temperatures {
    /// Reads a temperature file.
    ///
    /// # Errors
    /// The problem, with the file's name.
    pub fn read(file: &Path) -> Result<Self, String> {
        let name = file.display();
        let bytes = fs::read(file)
            .map_err(|error| format!("{name}: {error}; `deepspec-eval calibrate` writes such a file"))?;
        let read: Self = serde_json::from_slice(&bytes).map_err(|error| format!("{name}: {error}"))?;
        // The engine divides in float32, where a smaller temperature would be 0 or subnormal.
        let unusable = |t: &f64| !(*t > 0.0 && (*t as f32).is_normal());
        match read.temperatures.iter().position(unusable) {
            Some(at) => Err(format!(
                "{name}: `temperatures[{at}]` is {:e}, no positive number of 32 bits",
                read.temperatures[at]
            )),
            None => Ok(read),
        }
    }

    /// Checks that the file does not name another drafter or longer blocks, and returns the
    /// temperatures.
    ///
    /// # Errors
    /// The difference, with the file's name.
    pub fn into_temperatures_for(
        self,
        file: &Path,
        [config, weights]: [&str; 2],
        block: usize,
    ) -> Result<Vec<f64>, String> {
        let (name, found) = (file.display(), self.temperatures.len());
        if found > block {
            return Err(format!("{name} has {found} temperatures, blocks of the drafter {block} tokens"));
        }
        match self.drafter {
            Some(other) if [&other.config_digest[..], &other.weights_digest] != [config, weights] => {
                Err(format!(
                    "{name} was found for the drafter {}, which is another; calibrate this one",
                    other.path
                ))
            }
            _ => Ok(self.temperatures),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("t.json");
        let of = |text: &str, block| {
            fs::write(&file, text).unwrap();
            Temperatures::read(&file).and_then(|read| read.into_temperatures_for(&file, ["a", "b"], block))
        };
        assert_eq!(of(r#"{"temperatures": [1.0, 2], "num_samples": 9}"#, 2).unwrap(), [1.0, 2.0]);
        let ours = r#"{"temperatures": [1.5], "drafter": {"path": "p", "config_digest": "a", "weights_digest": "b"}}"#;
        assert_eq!(of(ours, 7).unwrap(), [1.5]);
        for (text, words) in [
            (ours.replace("\"b\"", "\"c\""), "found for the drafter p"),
            (r#"{"temperatures": [1, 1, 1]}"#.into(), "3 temperatures, blocks of the drafter 2"),
            (r#"{"temperatures": [1, 0]}"#.into(), "`temperatures[1]` is 0e0"),
            ("{}".into(), "missing field `temperatures`"),
        ] {
            let told = of(&text, 2).unwrap_err();
            assert!(told.contains(words) && told.contains("t.json"), "{told}");
        }
    }
}
