//! `checkpoint inspect` and `checkpoint convert`, and the errors of commands that read only our own
//! layout.

#[path = "../common/mod.rs"]
mod common;
mod eagle;

use std::fs;
use std::path::{Path, PathBuf};

use common::{
    answers, assert_refused, convert, deepspec_eval, drafter_config, repository, results, run, run_ok,
    target_dir, write_domino, write_drafter, write_dspark_v4, write_eagle3, write_mtp, write_peagle,
    write_xpress,
};
use deepspec_core::Tap;
use deepspec_drafters::DSpark;
use deepspec_models::{ModelConfig, load_embed_and_head, save_checkpoint};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

/// An untrained DSpark with the tiny target's own embedding and head.
fn drafter(root: &Path) -> PathBuf {
    let dir = root.join("drafter");
    let model = ModelConfig::load(&target_dir()).unwrap();
    let (embed, head) = load_embed_and_head(&target_dir(), &model, Device::Cpu, Kind::Float).unwrap();
    let mut config = drafter_config();
    config.decoder.taps = Tap::from_layer_ids([0, 2, 4]).unwrap();
    write_drafter(&dir, config, |name, tensor| match name {
        "embed_tokens.weight" => embed.shallow_clone(),
        "lm_head.weight" => head.shallow_clone(),
        _ => tensor,
    });
    dir
}

fn ok(output: std::process::Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_checkpoint_goes_there_and_back_and_is_described() {
    let root = tempfile::tempdir().unwrap();
    let (own, away, back) = (drafter(root.path()), root.path().join("away"), root.path().join("back"));
    ok(convert(&own, "speculators", &away, &[]));
    let text = ok(deepspec_eval(&["checkpoint", "inspect", away.to_str().unwrap()]));
    for line in [
        "format      speculators (DSparkSpeculator)",
        "outputs of layers [0, 2, 4] of 6 (as speculators and vLLM count: [1, 3, 5])",
        "5 tokens in blocks of 5; slot k predicts anchor+1+k",
        "Markov head vanilla of rank 1024",
        "to reference: yes",
        "to z-lab: no, the weights are not interchangeable",
        "vLLM (0.32.0, tried) loads it: method dspark",
        "SGLang (by its sources) does not load it",
        "llama.cpp (of llama-cpp-python 0.3.36, tried) does not load it: it loads GGUF files; convert to gguf",
        "speculators (0.9.0, tried) loads it",
    ] {
        assert!(text.contains(line), "{line:?} not in:\n{text}");
    }
    let json = ok(deepspec_eval(&["checkpoint", "inspect", "--json", away.to_str().unwrap()]));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["dialect"], &json["algorithm"]), (&"speculators".into(), &"dspark".into()));
    assert_eq!(json["problem"], Value::Null);
    ok(convert(&away, "reference", &back, &[]));
    let json = ok(deepspec_eval(&["checkpoint", "inspect", "--json", back.to_str().unwrap()]));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["parameters"]["target"], 2 * 1024 * 192);
}

/// Results and descriptions do not depend on the number of weight files.
#[test]
fn a_checkpoint_in_shards_is_read_by_every_command() {
    let root = tempfile::tempdir().unwrap();
    let (own, shards) = (drafter(root.path()), root.path().join("shards"));
    let block = DSpark::load(&own, Device::Cpu, Kind::BFloat16).unwrap();
    fs::create_dir(&shards).unwrap();
    fs::copy(own.join("config.json"), shards.join("config.json")).unwrap();
    save_checkpoint(&shards, &block.checkpoint(), Kind::BFloat16, 200_000).unwrap();
    assert!(
        shards.join("model.safetensors.index.json").is_file() && !shards.join("model.safetensors").exists()
    );
    let inspect = |dir: &Path| ok(deepspec_eval(&["checkpoint", "inspect", dir.to_str().unwrap()]));
    assert_eq!(inspect(&shards), inspect(&own));
    let converted = |from: &Path, name: &str| {
        let out = root.path().join(name);
        ok(convert(from, "speculators", &out, &[]));
        fs::read(out.join("model.safetensors")).unwrap()
    };
    assert!(converted(&shards, "from-shards") == converted(&own, "from-one"));
    let measured = |drafter: &Path, name: &str| {
        let out = root.path().join(name);
        let args = ["--suite", "smoke-math", "--limit", "2", "--max-new-tokens", "8", "--temperature", "0"];
        run_ok(drafter.to_str().unwrap(), &out, &args);
        (answers(&out), results(&out)["suites"][0]["counts"].clone())
    };
    let found = measured(&shards, "several");
    assert_eq!(found, measured(&own, "one"));
    assert!(found.1.is_object(), "{found:?}");
}

#[test]
fn refusals_are_the_callers_mistakes() {
    let root = tempfile::tempdir().unwrap();
    let (own, away) = (drafter(root.path()), root.path().join("away"));
    assert_refused(
        &convert(&own, "z-lab", &away, &[]),
        2,
        &["not convertible to z-lab", "not interchangeable"],
    );
    assert!(!away.exists());
    let nothing = root.path().join("nothing");
    fs::create_dir(&nothing).unwrap();
    assert_refused(&convert(&nothing, "z-lab", &away, &[]), 1, &["nothing/config.json", "no such file"]);
    ok(convert(&own, "specforge", &away, &[]));
    ok(convert(&own, "specforge", &away, &[])); // a second conversion changes nothing
    fs::write(away.join("config.json"), "{}").unwrap();
    assert_refused(&convert(&own, "specforge", &away, &[]), 2, &["--overwrite replaces it"]);
    ok(convert(&own, "specforge", &away, &["--overwrite"]));
    let unknown = convert(&own, "medusa", &away, &[]);
    let told = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert_eq!(unknown.status.code(), Some(2));
    assert!(
        told.contains("`medusa` is no format; expected reference, speculators, specforge, z-lab, modelopt"),
        "{told}"
    );
    let eagle3 = root.path().join("eagle3");
    write_eagle3(&eagle3);
    let out = root.path().join("eagle3-out");
    assert_refused(&convert(&eagle3, "speculators", &out, &[]), 2, &["layer id 5 is outside of 0 to 4"]);
}

#[test]
fn domino_is_inspected_and_goes_to_its_layouts_and_back() {
    let root = tempfile::tempdir().unwrap();
    let [written, own] = ["written", "own"].map(|name| root.path().join(name));
    write_domino(&written);
    let inspected = |dir: &Path| ok(deepspec_eval(&["checkpoint", "inspect", dir.to_str().unwrap()]));
    let text = inspected(&written);
    for line in [
        "drafter     Domino, 1 Qwen3 layer",
        "drafts      5 tokens in blocks of 5; slot k predicts anchor+1+k (all slots draft)",
        "correction  of rank 16, by a GRU of 24 values; not of the first draft",
        "converts    to specforge: no, layer id -1",
        "engine      vLLM (by its sources) does not load it: it has no correction head of Domino",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
    // Layers whose states mean the same everywhere.
    fs::create_dir(&own).unwrap();
    fs::copy(written.join("model.safetensors"), own.join("model.safetensors")).unwrap();
    let config = fs::read_to_string(written.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["target_layer_ids"] = json!([0, 2, 4]);
    fs::write(own.join("config.json"), config.to_string()).unwrap();
    let measured = |drafter: &Path, name: &str| {
        let out = root.path().join(name);
        run_ok(
            drafter.to_str().unwrap(),
            &out,
            &["--suite", "smoke-math", "--limit", "2", "--max-new-tokens", "8"],
        );
        (answers(&out), results(&out)["suites"][0]["counts"].clone())
    };
    let expected = measured(&own, "results");
    for format in ["specforge", "modelopt", "sglang"] {
        let [away, back] = ["away", "back"].map(|name| root.path().join(format!("{format}-{name}")));
        ok(convert(&own, format, &away, &[]));
        let text = inspected(&away);
        assert!(!text.contains("problem"), "{text}");
        let loads = "SGLang (by its sources) loads it: --speculative-algorithm DFLASH";
        assert_eq!(text.contains(loads), format != "specforge", "{text}");
        ok(convert(&away, "reference", &back, &[]));
        assert_eq!(measured(&back, &format!("{format}-results")), expected);
    }
    let out = root.path().join("vllm");
    assert_refused(&convert(&own, "vllm", &out, &[]), 2, &["vLLM does not run it", "only SGLang has one"]);
}

#[test]
fn mtp_1_is_inspected_and_goes_to_speculators_and_back() {
    let root = tempfile::tempdir().unwrap();
    let [own, away, back] = ["own", "away", "back"].map(|name| root.path().join(name));
    write_mtp(&own);
    let text = ok(deepspec_eval(&["checkpoint", "inspect", own.to_str().unwrap()]));
    for line in [
        "drafter     MTP-1, 1 Qwen3 layer",
        "drafts      3 tokens, one after the other",
        "taps        none: it reads the final states",
        "converts    to speculators: yes",
        "engine      vLLM (by its sources) does not load it",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
    assert!(!text.contains("problem"), "{text}");
    ok(convert(&own, "speculators", &away, &[]));
    ok(convert(&away, "reference", &back, &[]));
    assert!(fs::read(own.join("model.safetensors")).unwrap().len() > 1 << 16);
    let measured = |drafter: &Path, name: &str| {
        let out = root.path().join(name);
        run_ok(
            drafter.to_str().unwrap(),
            &out,
            &["--suite", "smoke-math", "--limit", "2", "--max-new-tokens", "8"],
        );
        (answers(&out), results(&out)["suites"][0]["counts"].clone())
    };
    assert_eq!(measured(&own, "one"), measured(&back, "other"));
}

#[test]
fn p_eagle_is_inspected_and_goes_to_speculators_and_vllm_and_back() {
    let root = tempfile::tempdir().unwrap();
    let own = root.path().join("own");
    write_peagle(&own);
    let inspected = |dir: &Path| ok(deepspec_eval(&["checkpoint", "inspect", dir.to_str().unwrap()]));
    let text = inspected(&own);
    for line in [
        "drafter     P-EAGLE, 2 Qwen3 layers",
        "drafts      4 tokens in one pass",
        "mask token  1023",
        "converts    to speculators: yes",
        "converts    to specforge: no",
        "SGLang (by its sources) does not load it: it has no P-EAGLE",
        "llama.cpp has no P-EAGLE",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
    assert!(!text.contains("problem"), "{text}");
    let measured = |drafter: &Path, name: &str| {
        let out = root.path().join(name);
        run_ok(
            drafter.to_str().unwrap(),
            &out,
            &["--suite", "smoke-math", "--limit", "2", "--max-new-tokens", "8"],
        );
        (answers(&out), results(&out)["suites"][0]["counts"].clone())
    };
    let expected = measured(&own, "results");
    for format in ["speculators", "vllm"] {
        let [away, back] = ["away", "back"].map(|name| root.path().join(format!("{format}-{name}")));
        let converted = convert(&own, format, &away, &[]);
        let told = String::from_utf8_lossy(&converted.stderr).into_owned();
        ok(converted);
        assert_eq!(told.contains("\"parallel_drafting\": true"), format == "vllm", "{told}");
        let text = inspected(&away);
        assert!(!text.contains("problem"), "{text}");
        assert!(
            text.contains("vLLM (0.32.0, tried) loads it: method eagle3 with parallel_drafting"),
            "{text}"
        );
        ok(convert(&away, "reference", &back, &[]));
        assert_eq!(measured(&back, &format!("{format}-results")), expected);
    }
    let out = root.path().join("sglang");
    assert_refused(&convert(&own, "sglang", &out, &[]), 2, &["SGLang does not load it", "no P-EAGLE"]);
}

#[test]
fn dspark_of_deepseek_v4_is_inspected_and_goes_to_llama_cpp_only() {
    let root = tempfile::tempdir().unwrap();
    let own = root.path().join("own");
    write_dspark_v4(&own);
    let text = ok(deepspec_eval(&["checkpoint", "inspect", own.to_str().unwrap()]));
    for line in [
        "drafter     DSpark of DeepSeek-V4, 1 stage, hidden size",
        "drafts      5 tokens in blocks of 5",
        "stages      4 heads of 32, window 16, 2 of 4 experts, 4 residual streams",
        "llama.cpp (of llama-cpp-python 0.3.36, tried) does not load it: it loads GGUF files; convert to gguf",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
    assert!(!text.contains("problem"), "{text}");
    for (to, reason) in [
        ("vllm", "a part of that target's own checkpoint"),
        ("sglang", "a part of that target's own checkpoint"),
        ("speculators", "no layout for latent attention"),
    ] {
        assert_refused(&convert(&own, to, &root.path().join(to), &[]), 2, &[reason]);
    }
    let gguf = convert(&own, "gguf", &root.path().join("gguf"), &[]);
    let told = String::from_utf8_lossy(&gguf.stderr).into_owned();
    assert!(
        gguf.status.success() && told.contains("--spec-type draft-dspark --spec-draft-n-max 5"),
        "{told}"
    );
    let config = fs::read_to_string(own.join("config.json")).unwrap();
    assert!(config.contains("\"hc_mult\":4"), "{config}");
    let fewer = root.path().join("fewer");
    fs::create_dir(&fewer).unwrap();
    fs::copy(own.join("model.safetensors"), fewer.join("model.safetensors")).unwrap();
    fs::write(fewer.join("config.json"), config.replace("\"hc_mult\":4", "\"hc_mult\":2")).unwrap();
    let out = root.path().join("fewer-gguf");
    assert_refused(&convert(&fewer, "gguf", &out, &[]), 2, &["4 residual streams", "`hc_mult` is 2"]);
    let [target, own, out] =
        [target_dir(), own, root.path().join("merged")].map(|path| path.display().to_string());
    let merged = deepspec_eval(&[
        "checkpoint",
        "merge-mtp",
        "--draft",
        &own,
        "--target",
        &target,
        "--output-dir",
        &out,
    ]);
    assert_refused(&merged, 2, &["not merged into Qwen3ForCausalLM", "DeepseekV4ForCausalLM"]);
}

#[test]
fn xpress_is_inspected_and_goes_to_other_layouts_and_back() {
    let root = tempfile::tempdir().unwrap();
    let own = root.path().join("own");
    write_xpress(&own);
    let text = ok(deepspec_eval(&["checkpoint", "inspect", own.to_str().unwrap()]));
    for line in [
        "drafter     xPress, 1 Qwen3 layer",
        "drafts      4 tokens in blocks of 5",
        "refiner     of rank 16, MLP of width 32, 3 passes",
        "converts    to speculators: yes",
        "vLLM 0.32 has no xPress",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
    assert!(!text.contains("problem"), "{text}");
    let measured = |drafter: &Path, name: &str| {
        let out = root.path().join(name);
        let table = run_ok(
            drafter.to_str().unwrap(),
            &out,
            &["--suite", "smoke-math", "--limit", "2", "--max-new-tokens", "8"],
        );
        let table = table.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(table.contains("No engine loads this drafter."), "{table}");
        (answers(&out), results(&out)["suites"][0]["counts"].clone())
    };
    let expected = measured(&own, "own-run");
    for layout in ["speculators", "z-lab"] {
        let [away, back] = ["away", "back"].map(|name| root.path().join(format!("{layout}-{name}")));
        ok(convert(&own, layout, &away, &[]));
        ok(convert(&away, "reference", &back, &[]));
        assert_eq!(measured(&back, &format!("{layout}-run")), expected, "{layout}");
    }
    for (to, reason) in [
        ("vllm", "vLLM 0.32 has no xPress"),
        ("sglang", "SGLang has no xPress"),
        ("gguf", "llama.cpp has no xPress"),
    ] {
        assert_refused(&convert(&own, to, &root.path().join(to), &[]), 2, &[reason]);
    }
}

#[test]
fn another_format_is_named_with_the_command_that_converts_it() {
    let root = tempfile::tempdir().unwrap();
    let (own, away) = (drafter(root.path()), root.path().join("away"));
    ok(convert(&own, "specforge", &away, &[]));
    let told = run(away.to_str().unwrap(), &root.path().join("results"), &["--limit", "1"]);
    let command = format!("`deepspec-eval checkpoint convert --from {} --to reference", away.display());
    assert_refused(&told, 1, &["DSparkDraftModel is not read", "format of specforge", &command]);
}

#[test]
fn what_engines_are_given_can_be_read_again() {
    let root = tempfile::tempdir().unwrap();
    let own = drafter(root.path());
    let [served, back, file] = ["served", "back", "gguf"].map(|name| root.path().join(name));
    ok(convert(&own, "vllm", &served, &[]));
    let text = ok(deepspec_eval(&["checkpoint", "inspect", served.to_str().unwrap()]));
    assert!(!text.contains("problem"), "{text}");
    let told = run(served.to_str().unwrap(), &root.path().join("results"), &["--limit", "1"]);
    let command = format!("`deepspec-eval checkpoint convert --from {} --to reference", served.display());
    assert_refused(&told, 1, &["embedding and head from the target", &command]);
    ok(convert(&served, "gguf", &file, &[]));
    ok(convert(&served, "reference", &back, &[]));
    let weights = |dir: &Path| {
        let mut tensors = Tensor::read_safetensors(dir.join("model.safetensors")).unwrap();
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        tensors
    };
    let (before, after) = (weights(&own), weights(&back));
    assert_eq!(before.len(), after.len());
    for ((name, one), (other, two)) in before.iter().zip(&after) {
        assert!(name == other && one == two, "{name}, {other}");
    }
}

#[test]
fn the_doctor_says_what_an_engine_would_make_of_a_folder() {
    let root = tempfile::tempdir().unwrap();
    let (own, away) = (drafter(root.path()), root.path().join("away"));
    ok(convert(&own, "speculators", &away, &[]));
    let target = target_dir();
    let asked = |draft: &Path, engine: &str| {
        let mut args =
            vec!["checkpoint", "doctor", "--json", "--quiet", "--device", "cpu", "--engine", engine];
        args.extend(["--target", target.to_str().unwrap(), "--draft", draft.to_str().unwrap()]);
        args.extend(["--limit", "1", "--max-new-tokens", "8", "--temperature", "0"]);
        let suites = repository("eval_datasets");
        args.extend(["--suites-dir", suites.to_str().unwrap()]);
        let told: Value = serde_json::from_str(&ok(deepspec_eval(&args))).unwrap();
        let about = told["serving"]["risks"].as_array().unwrap().iter();
        let about: Vec<String> = about.map(|risk| risk["about"].as_str().unwrap().to_string()).collect();
        (told, about)
    };
    // For a folder that this program reads, with the expected accepted length.
    let (told, about) = asked(&own, "vllm");
    assert_eq!(about, ["slots", "layer ids", "drafted tokens"]);
    assert!(told["serving"]["expected"].as_f64().unwrap() >= 1.0, "{told}");
    // For a folder that it does not read, from its files alone.
    let (told, about) = asked(&away, "sglang");
    assert!(about.contains(&"layout".to_string()), "{told}");
    assert!(told["verdict"].as_str().unwrap().contains("DSparkSpeculator is not read"), "{told}");
    assert_eq!((&told["accepted_length"], &told["serving"]["expected"]), (&Value::Null, &Value::Null));
}
