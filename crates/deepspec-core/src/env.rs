//! All environment variables that the tools read.

mod ranks;

use std::env::{var, var_os};
use std::fs;
use std::path::PathBuf;

pub use ranks::{DistributedEnv, OMP_THREADS_VARIABLE, RanksError, has_thread_count};
use ranks::{ranks_from_torchrun, slurm};

/// `RUST_LOG`: a log filter that overrides `--quiet` and `-v`.
pub fn rust_log() -> Option<String> {
    var("RUST_LOG").ok().filter(|text| !text.is_empty())
}

/// `HOME`, for paths that begin with `~`.
pub fn home() -> Option<PathBuf> {
    var_os("HOME").map(PathBuf::from)
}

/// Reads an API key from the variable `name`, such as `OPENAI_API_KEY`. None if it is unset or
/// empty.
pub fn read_secret(name: &str) -> Option<String> {
    var(name).ok().map(|key| key.trim().to_string()).filter(|key| !key.is_empty())
}

/// Warns if the key in `variable` would be sent unencrypted, over plain HTTP to another machine.
pub fn warn_unencrypted_key(variable: &str, url: &str) {
    if read_secret(variable).is_some() && is_sent_unencrypted(url) {
        tracing::warn!(
            "the key in {variable} is sent to {url} in clear: use https, or unset {variable} where the server asks for none"
        );
    }
}

fn is_sent_unencrypted(url: &str) -> bool {
    let Some(rest) = url.strip_prefix("http://") else { return false };
    let place = rest.split(['/', '?']).next().unwrap_or_default();
    let place = place.rsplit('@').next().unwrap_or_default();
    let host = match place.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => place.split(':').next().unwrap_or_default(),
    };
    let is_loopback = host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    !host.eq_ignore_ascii_case("localhost") && !is_loopback
}

/// Whether `CUDA_VISIBLE_DEVICES` hides all GPUs.
pub fn hides_gpus() -> bool {
    let first =
        |list: &str| list.split(',').next().is_some_and(|id| ["", "-1", "NoDevFiles"].contains(&id.trim()));
    var("CUDA_VISIBLE_DEVICES").is_ok_and(|list| first(&list))
}

/// Cache folder for reproducible files of all runs: `DEEPSPEC_CACHE`, else `deepspec` in
/// `XDG_CACHE_HOME` or `~/.cache`. None if no home folder is known.
pub fn cache_dir() -> Option<PathBuf> {
    cache_dir_from(|name| var(name).ok())
}

/// [`cache_dir`] with variables from `read` instead of this process.
pub fn cache_dir_from(read: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let given = |name: &str| read(name).filter(|text| !text.is_empty());
    let path = |name: &str| given(name).map(|text| expand(&text, given("HOME")));
    path("DEEPSPEC_CACHE").or_else(|| Some(user_cache_dir(path)?.join("deepspec")))
}

/// `XDG_CACHE_HOME`, else `.cache` in `HOME`.
fn user_cache_dir(path: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")))
}

/// `NO_COLOR`: no colours, even on a terminal.
pub fn is_color_disabled() -> bool {
    var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// Settings of the Hugging Face hub, from the variables of the Python tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubEnv {
    /// `HF_ENDPOINT` without a final slash; the public hub by default.
    pub endpoint: String,
    /// `HF_TOKEN` as given.
    pub token: Option<String>,
    /// `HF_TOKEN_PATH`, else `token` in `HF_HOME`: the file of a stored token.
    pub token_path: Option<PathBuf>,
    /// `HF_HUB_DISABLE_IMPLICIT_TOKEN`: send no token.
    pub anonymous: bool,
    /// `HF_HUB_CACHE`, else `hub` in `HF_HOME`. None if no home folder is known.
    pub cache: Option<PathBuf>,
    /// First of `HF_HUB_OFFLINE`, `TRANSFORMERS_OFFLINE` and `HF_DATASETS_OFFLINE` that is on.
    pub offline: Option<&'static str>,
}

/// The hub's environment variables. `HF_HOME` defaults to `huggingface` in `XDG_CACHE_HOME` or
/// `~/.cache`.
pub fn hub_env() -> HubEnv {
    hub_env_from(|name| var(name).ok())
}

/// [`hub_env`] with variables from `read` instead of this process.
pub fn hub_env_from(read: impl Fn(&str) -> Option<String>) -> HubEnv {
    let given = |name: &str| read(name).filter(|text| !text.is_empty());
    let path = |name: &str| given(name).map(|text| expand(&text, given("HOME")));
    let is_on = |name: &str| {
        given(name).is_some_and(|text| ["1", "ON", "YES", "TRUE"].contains(&text.to_uppercase().as_str()))
    };
    let home = path("HF_HOME").or_else(|| Some(user_cache_dir(path)?.join("huggingface")));
    let under_home = |name| home.as_ref().map(|home| home.join(name));
    let offline = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"];
    let endpoint = given("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
    HubEnv {
        endpoint: endpoint.trim_end_matches('/').to_string(),
        token: given("HF_TOKEN").or_else(|| given("HUGGING_FACE_HUB_TOKEN")),
        token_path: path("HF_TOKEN_PATH").or_else(|| under_home("token")),
        anonymous: is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN"),
        cache: path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).or_else(|| under_home("hub")),
        offline: offline.into_iter().find(|name| is_on(name)),
    }
}

/// Reads rank, world size and rendezvous address of this process; `None` if it runs alone.
///
/// # Errors
/// See [`RanksError`].
pub fn distributed_env() -> Result<Option<DistributedEnv>, RanksError> {
    let port_range = || fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok();
    ranks_from(|name| var(name).ok(), port_range)
}

/// Expands a leading `~` to the home folder.
pub fn expand_home(path: &str) -> PathBuf {
    expand(path, home())
}

fn expand(path: &str, home: Option<impl Into<PathBuf>>) -> PathBuf {
    match (path.strip_prefix("~/"), home) {
        (Some(rest), Some(home)) => home.into().join(rest),
        _ => PathBuf::from(path),
    }
}

/// [`distributed_env`] with variables from `read` and the system's ephemeral port range from `port_range`.
///
/// torchrun's variables come first: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. The
/// alternative is an `srun` task: SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, and the first
/// node of SLURM_STEP_NODELIST. Its port depends on SLURM_JOB_ID and SLURM_STEP_ID. A batch script
/// runs alone: it has SLURM_NTASKS but is no task of a step. The only task of a step without
/// MASTER_ADDR also runs alone and may start processes itself.
///
/// # Errors
/// See [`RanksError`].
pub fn ranks_from(
    read: impl Fn(&str) -> Option<String>,
    port_range: impl Fn() -> Option<String>,
) -> Result<Option<DistributedEnv>, RanksError> {
    let given = |name: &str| read(name).filter(|text| !text.is_empty());
    let ranks = if given("RANK").is_some() {
        Some(ranks_from_torchrun(given)?)
    } else if given(slurm::TASK_COUNT_VARIABLE).is_some() {
        slurm::ranks_from_slurm(given, port_range().as_deref())?
    } else {
        None
    };
    let Some(ranks) = ranks else { return Ok(None) };
    if ranks.rank >= ranks.world_size {
        return Err(RanksError::Value {
            name: "RANK",
            value: ranks.rank.to_string(),
            expected: format!("less than the number of processes, {}", ranks.world_size),
        });
    }
    Ok(Some(ranks))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub_with(variables: &[(&str, &str)]) -> HubEnv {
        hub_env_from(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn the_hub_is_found_as_the_python_tools_find_it() {
        let plain = hub_with(&[("HOME", "/home/me"), ("HF_HUB_OFFLINE", "0")]);
        assert_eq!(
            plain,
            HubEnv {
                endpoint: "https://huggingface.co".into(),
                token: None,
                token_path: Some("/home/me/.cache/huggingface/token".into()),
                anonymous: false,
                cache: Some("/home/me/.cache/huggingface/hub".into()),
                offline: None,
            }
        );
        let moved = hub_with(&[("HOME", "/home/me"), ("XDG_CACHE_HOME", "/x"), ("HF_TOKEN_PATH", "~/t")]);
        assert_eq!(moved.cache, Some("/x/huggingface/hub".into()));
        assert_eq!(moved.token_path, Some("/home/me/t".into()));
        let set = hub_with(&[
            ("HF_HOME", "/h"),
            ("HF_HUB_CACHE", "/c"),
            ("HF_ENDPOINT", "http://mirror:1/"),
            ("HF_TOKEN", "secret"),
            ("TRANSFORMERS_OFFLINE", "yes"),
            ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"),
        ]);
        assert_eq!((set.endpoint.as_str(), set.token.as_deref()), ("http://mirror:1", Some("secret")));
        assert_eq!((set.cache, set.token_path), (Some("/c".into()), Some("/h/token".into())));
        assert_eq!((set.anonymous, set.offline), (true, Some("TRANSFORMERS_OFFLINE")));
        assert_eq!(hub_with(&[]).cache, None);
    }

    #[test]
    fn keys_are_in_clear_on_plain_http_to_other_machines() {
        for url in ["http://10.0.0.5:8000", "http://gpu-1/v1", "http://me:pw@gpu-1:80", "http://[fe80::1]:80"]
        {
            assert!(is_sent_unencrypted(url), "{url}");
        }
        for url in ["https://10.0.0.5", "http://localhost:1", "http://127.0.0.1:30000/v1", "http://[::1]:80"]
        {
            assert!(!is_sent_unencrypted(url), "{url}");
        }
    }

    #[test]
    fn what_can_be_made_again_has_a_place() {
        let place = |variables: &[(&str, &str)]| {
            cache_dir_from(|name| {
                variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string())
            })
        };
        let home = ("HOME", "/home/me");
        assert_eq!(place(&[home]), Some("/home/me/.cache/deepspec".into()));
        assert_eq!(place(&[home, ("XDG_CACHE_HOME", "/x")]), Some("/x/deepspec".into()));
        assert_eq!(
            place(&[home, ("XDG_CACHE_HOME", "/x"), ("DEEPSPEC_CACHE", "~/own")]),
            Some("/home/me/own".into())
        );
        assert_eq!(place(&[home, ("DEEPSPEC_CACHE", "")]), Some("/home/me/.cache/deepspec".into()));
        assert_eq!(place(&[]), None);
    }
}
