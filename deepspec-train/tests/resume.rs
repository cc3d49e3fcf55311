//! Resuming from folders with copied, lost or torn files, and the folders that a run never
//! overwrites.

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use common::{Bench, STEPS, start_until};
use deepspec_testkit::golden::{Values, arrays};

fn step(bench: &Bench, step: usize) -> PathBuf {
    bench.path("out/t").join(format!("step_{step}"))
}

fn link(bench: &Bench) -> PathBuf {
    bench.path("out/t/step_latest")
}

/// Identifies a file, to detect that it was replaced.
fn inode(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

/// A run that was killed after its checkpoint at step 9.
fn begun() -> Bench {
    let bench = Bench::new();
    let mut child = start_until(&bench, 10, &[]);
    child.kill().unwrap();
    child.wait().unwrap();
    bench
}

fn whole() -> Bench {
    let bench = Bench::new();
    bench.succeeds(&[]);
    bench
}

/// Runs successfully; returns the whole output.
fn says(bench: &Bench, args: &[&str]) -> String {
    let output = bench.run(args);
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8(said).unwrap();
    assert!(output.status.success(), "{said}");
    said
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy(&path, &to);
        } else {
            fs::copy(&path, &to).unwrap();
        }
    }
}

#[test]
fn a_finished_run_without_its_link_is_finished() {
    let bench = whole();
    let files = [step(&bench, 3), step(&bench, STEPS)].map(|step| step.join("model.safetensors"));
    let before = (bench.result(), files.each_ref().map(|file| inode(file)), bench.metrics());
    fs::remove_file(link(&bench)).unwrap();
    let plan = says(&bench, &["--plan"]);
    assert!(plan.contains(&format!("step_{STEPS}")) && !plan.contains("starts anew"), "{plan}");
    let said = says(&bench, &[]);
    assert!(said.contains("complete"), "{said}");
    assert_eq!(files.each_ref().map(|file| inode(file)), before.1, "a checkpoint was written anew");
    assert_eq!(bench.metrics(), before.2);
    // With --overwrite the run starts anew and says so.
    let plan = says(&bench, &["--plan", "--overwrite"]);
    assert!(plan.contains("starts anew"), "{plan}");
    bench.succeeds(&["--overwrite"]);
    assert!(bench.result() == before.0);
    assert_ne!(inode(&files[1]), before.1[1]);
}

#[test]
fn a_lost_link_leads_to_the_highest_whole_checkpoint() {
    let whole = whole();
    // The newest checkpoint is damaged in various ways.
    for torn in ["", "model.safetensors", "config.json", "train_state/optimizer.safetensors"] {
        let bench = begun();
        fs::remove_file(link(&bench)).unwrap();
        if !torn.is_empty() {
            fs::remove_file(step(&bench, 9).join(torn)).unwrap();
        }
        let said = says(&bench, &[]);
        let from = if torn.is_empty() { "step_9" } else { "step_6" };
        assert!(
            said.contains(&format!(
                "the newest whole checkpoint is {}",
                bench.path("out/t").join(from).display()
            )),
            "{torn}: {said}"
        );
        assert!(bench.result() == whole.result(), "{torn}: other weights");
        assert_eq!(bench.losses(), whole.losses(), "{torn}");
    }
}

#[test]
fn a_copy_that_followed_links_is_resumed() {
    let (whole, bench, alone) = (whole(), begun(), begun());
    fs::remove_file(link(&bench)).unwrap();
    copy(&step(&bench, 9), &link(&bench));
    bench.succeeds(&[]);
    assert!(bench.result() == whole.result());
    // Only the copy is left.
    fs::remove_file(link(&alone)).unwrap();
    fs::rename(step(&alone, 9), link(&alone)).unwrap();
    for at in [3, 6] {
        fs::remove_dir_all(step(&alone, at)).unwrap();
    }
    let said = says(&alone, &[]);
    assert!(said.contains("resuming from"), "{said}");
    assert!(alone.result() == whole.result());
}

#[test]
fn checkpoints_of_which_none_is_whole_are_not_trained_over() {
    let bench = begun();
    for at in [3, 6, 9] {
        fs::remove_dir_all(step(&bench, at).join("train_state")).unwrap();
    }
    let weights = step(&bench, 9).join("model.safetensors");
    let before = inode(&weights);
    for with_link in [true, false] {
        if !with_link {
            fs::remove_file(link(&bench)).unwrap();
        }
        bench.fails(&[], 1, &["step_latest", "none of the checkpoints", "--overwrite"]);
        assert_eq!(inode(&weights), before);
    }
    bench.succeeds(&["--overwrite"]);
    assert!(bench.result() == whole().result());
}

#[test]
fn a_finished_run_with_torn_weights_is_not_called_complete() {
    let bench = whole();
    let weights = step(&bench, STEPS).join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() - 100]).unwrap();
    bench.fails(&[], 1, &["model.safetensors"]);
}

/// All values of a tensor in a checkpoint.
fn values(dir: &Path, name: &str) -> Vec<f32> {
    match &arrays(&dir.join("model.safetensors"))[name].values {
        Values::Float(values) => values.clone(),
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn frozen_weights_are_those_of_the_checkpoint() {
    let init = |seed: &str| {
        let bench = Bench::new();
        bench.succeeds(&["--init-only", &format!("--set=seed={seed}")]);
        bench
    };
    let (first, other) = (init("8"), init("9"));
    let bench = Bench::new();
    let from = bench.path("init");
    copy(&step(&first, 0), &from);
    let args = [format!("--set=train.init_from={}", from.display()), "--set=train.freeze=[backbone]".into()];
    let args = [args[0].as_str(), args[1].as_str()];
    let undisturbed = Bench::new();
    undisturbed.succeeds(&args);
    let mut child = start_until(&bench, 4, &args);
    child.kill().unwrap();
    child.wait().unwrap();
    let names = ["fc.weight", "layers.0.mlp.up_proj.weight"];
    let frozen = names.map(|name| values(&step(&bench, 3), name));
    assert_eq!(frozen, names.map(|name| values(&from, name)));
    // The source has changed since.
    fs::copy(step(&other, 0).join("model.safetensors"), from.join("model.safetensors")).unwrap();
    assert_ne!(frozen, names.map(|name| values(&from, name)));
    bench.succeeds(&args);
    assert_eq!(frozen, names.map(|name| values(&step(&bench, STEPS), name)));
    assert!(bench.result() == undisturbed.result(), "a resumed run has other weights");
}

#[test]
fn a_whole_checkpoint_is_resumed_though_its_source_is_gone() {
    let (source, bench) = (Bench::new(), Bench::new());
    source.succeeds(&["--init-only", "--set=seed=8"]);
    let from = format!("--set=train.init_from={}", step(&source, 0).display());
    let args = [from.as_str(), "--set=train.freeze=[backbone]"];
    let mut child = start_until(&bench, 4, &args);
    child.kill().unwrap();
    child.wait().unwrap();
    fs::remove_dir_all(step(&source, 0)).unwrap();
    bench.succeeds(&args);
    assert_eq!(values(&step(&bench, 3), "fc.weight"), values(&step(&bench, STEPS), "fc.weight"));
}

/// A byte order mark before the recipe, and errors that belong to no line of it.
#[test]
fn recipes_are_read_as_editors_write_them_and_overrides_have_no_line() {
    let bench = Bench::new();
    let path = bench.path("recipe.yaml");
    let recipe = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("\u{feff}{recipe}")).unwrap();
    let plan = says(&bench, &["--plan"]);
    assert!(plan.contains("24 samples"), "{plan}");
    for (set, words) in [
        ("train.lr=-1", "train.lr"),
        ("train.lr=.nan", "train.lr"),
        ("train.max_train_steps=x", "a whole number"),
    ] {
        let output = bench.run(&["--plan", "--set", set]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("--set") && said.contains(words) && !said.contains("recipe.yaml:"), "{said}");
        assert!(!said.contains("usize") && !said.contains("null"), "{said}");
    }
}
