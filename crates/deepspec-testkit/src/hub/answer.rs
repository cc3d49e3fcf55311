//! Responses of the hub to a path.

use deepspec_core::digest;
use serde_json::{Value, json};

use super::FakeRepo;

/// A response before the range or a fault is applied.
pub struct HubResponse {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
}

impl HubResponse {
    pub fn empty(status: u16, headers: Vec<(&'static str, String)>) -> Self {
        Self { status, headers, body: vec![] }
    }

    fn not_found(code: &str) -> Self {
        Self::empty(404, vec![("X-Error-Code", code.into())])
    }

    fn json(value: &Value) -> Self {
        let body = value.to_string().into_bytes();
        Self { status: 200, headers: vec![("Content-Type", "application/json".into())], body }
    }
}

/// The response to a path, from the hub on `port` with `repos`.
pub fn respond(repos: &[FakeRepo], port: u16, path: &str) -> HubResponse {
    let path = percent_decode(path.trim_start_matches('/'));
    if let Some(rest) = path.strip_prefix("cdn/") {
        let file = repos
            .iter()
            .flat_map(|repo| &repo.files)
            .find(|(name, (bytes, _))| rest == format!("{}/{name}", digest::sha256_of_bytes(bytes)));
        return match file {
            Some((_, (bytes, _))) => HubResponse {
                status: 200,
                headers: vec![("ETag", format!("\"{:x}\"", bytes.len()))],
                body: bytes.clone(),
            },
            None => HubResponse::empty(403, vec![]),
        };
    }
    let is_api = path.starts_with("api/");
    let (inside, is_content) = match path.strip_prefix("api/resolve-cache/") {
        Some(rest) => (rest, true),
        None => (path.strip_prefix("api/").unwrap_or(&path), false),
    };
    let name = |repo: &FakeRepo| if is_api { format!("{}/{}", repo.kind, repo.id) } else { repo.prefix() };
    let found: Vec<(&FakeRepo, &str)> = repos
        .iter()
        .filter_map(|repo| Some((repo, inside.strip_prefix(&name(repo))?.strip_prefix('/')?)))
        .collect();
    let Some((_, rest)) = found.first() else { return HubResponse::not_found("RepoNotFound") };
    let (verb, rest) =
        if is_content { ("content", *rest) } else { rest.split_once('/').unwrap_or((*rest, "main")) };
    // A revision may contain slashes if it was encoded with %2F, which was decoded above.
    let place = found.iter().find_map(|(repo, _)| {
        let names = repo.revisions.iter().cloned().chain([repo.commit()]);
        names.filter(|revision| repo.answers_to(revision)).find_map(|revision| {
            let after = rest.strip_prefix(revision.as_str())?;
            (after.is_empty() || after.starts_with('/'))
                .then(|| (*repo, after.trim_start_matches('/').to_string()))
        })
    });
    let Some((repo, file)) = place else { return HubResponse::not_found("RevisionNotFound") };
    match verb {
        "revision" => HubResponse::json(&repo_info(repo)),
        "tree" => HubResponse::json(&list_files(repo)),
        "resolve" | "content" => file_response(repo, port, &file, is_content),
        _ => HubResponse::empty(404, vec![]),
    }
}

fn repo_info(repo: &FakeRepo) -> Value {
    let siblings: Vec<Value> = repo.files.keys().map(|path| json!({"rfilename": path})).collect();
    json!({"id": repo.id, "sha": repo.commit(), "private": false, "gated": false, "disabled": false, "downloads": 0, "likes": 0,
        "tags": [], "siblings": siblings})
}

fn list_files(repo: &FakeRepo) -> Value {
    let entry = |(path, (bytes, lfs)): (&String, &(Vec<u8>, bool))| {
        let mut entry = json!({"type": "file", "oid": etag(bytes, false), "size": bytes.len(), "path": path});
        if *lfs {
            entry["lfs"] = json!({"oid": etag(bytes, true), "size": bytes.len(), "pointerSize": 134});
        }
        entry
    };
    repo.files.iter().map(entry).collect()
}

fn file_response(repo: &FakeRepo, port: u16, file: &str, is_content: bool) -> HubResponse {
    let Some((bytes, lfs)) = repo.files.get(file) else { return HubResponse::not_found("EntryNotFound") };
    let quoted = format!("\"{}\"", etag(bytes, *lfs));
    let mut headers = vec![("X-Repo-Commit", repo.commit())];
    match (lfs, is_content) {
        (true, _) => {
            headers.push(("X-Linked-Etag", quoted));
            headers.push(("X-Linked-Size", bytes.len().to_string()));
            let place = format!("{}/{}", digest::sha256_of_bytes(bytes), percent_encode(file));
            headers.push(("Location", format!("http://localhost:{port}/cdn/{place}")));
            HubResponse::empty(302, headers)
        }
        (false, false) => {
            let place = format!("{}/{}/{}/{}", repo.kind, repo.id, repo.commit(), percent_encode(file));
            headers.push(("Location", format!("/api/resolve-cache/{place}")));
            HubResponse::empty(307, headers)
        }
        (false, true) => {
            headers.push(("ETag", quoted));
            HubResponse { status: 200, headers, body: bytes.clone() }
        }
    }
}

/// ETag of a file: 64 hex digits for large files, 40 for others.
fn etag(bytes: &[u8], lfs: bool) -> String {
    let digest = digest::sha256_of_bytes(bytes);
    if lfs { digest } else { digest[..40].to_string() }
}

fn percent_decode(path: &str) -> String {
    let (mut bytes, mut rest) = (vec![], path.as_bytes());
    while let [first, after @ ..] = rest {
        let hex = after.get(..2).and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        match hex.filter(|_| *first == b'%') {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn percent_encode(path: &str) -> String {
    path.replace('%', "%25").replace(' ', "%20").replace('#', "%23").replace('?', "%3F")
}
