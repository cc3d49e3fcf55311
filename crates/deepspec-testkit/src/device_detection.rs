//! Tests of how a program detects the machine's devices.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// Makes the machine seem to have a GPU that libtorch cannot use. Puts an `nvidia-smi` that lists
/// one GPU into `dir` at the front of `PATH`, and hides all real GPUs.
///
/// # Panics
/// Panics if the script cannot be written.
pub fn with_unusable_gpu(command: &mut Command, dir: &Path) {
    let program = dir.join("nvidia-smi");
    fs::write(&program, "#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)'\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", dir.display())).env("CUDA_VISIBLE_DEVICES", "99");
}

/// Runs `command`, which must have `--device auto`, with an unusable GPU. A single process must
/// warn with the reason and run on the CPU. Hidden GPUs must not cause a warning. One of two
/// processes must end with exit code 2.
///
/// # Panics
/// Panics if the program behaves otherwise.
pub fn assert_misses_gpus(command: impl Fn() -> Command, dir: &Path) {
    let says = |command: &mut Command| {
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let unusable = || {
        let mut command = command();
        with_unusable_gpu(&mut command, dir);
        command
    };
    let (_, said) = says(&mut unusable());
    let warnings: Vec<&str> = said.lines().filter(|line| line.contains("nvidia-smi lists a GPU")).collect();
    assert_eq!(warnings.len(), 1, "{said}");
    assert!(warnings[0].contains("WARN") && warnings[0].contains("running on the CPU"), "{said}");
    let (_, said) = says(unusable().env("CUDA_VISIBLE_DEVICES", ""));
    assert!(!said.contains("nvidia-smi"), "{said}");
    let place = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost")];
    let (code, said) = says(unusable().envs(place).env("MASTER_PORT", "1"));
    let last = said.lines().last().unwrap_or_default();
    assert!(code == Some(2) && last.contains("nvidia-smi lists a GPU"), "{code:?}: {said}");
    assert!(last.contains("say --device cpu"), "{said}");
}

/// Checks that OpenMP threads of `program` go to sleep after a short wait, unless the user sets the
/// wait policy.
///
/// # Panics
/// Panics if they do not.
pub fn assert_waits_asleep(program: &str) {
    let spins = |variable: Option<(&str, &str)>| {
        let mut command = Command::new(program);
        command.arg("--version").env("OMP_DISPLAY_ENV", "verbose");
        command.env_remove("OMP_WAIT_POLICY").env_remove("GOMP_SPINCOUNT").envs(variable);
        let output = command.output().unwrap();
        assert!(output.status.success() && output.stdout.starts_with(b"deepspec-"), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let line = said.lines().find(|line| line.contains("GOMP_SPINCOUNT"));
        line.and_then(|line| line.split('\'').nth(1)).unwrap_or_else(|| panic!("{said}")).to_owned()
    };
    assert_eq!(spins(None), "1000");
    assert_eq!(spins(Some(("GOMP_SPINCOUNT", "77"))), "77");
    assert_eq!(spins(Some(("OMP_WAIT_POLICY", "PASSIVE"))), "0");
}
