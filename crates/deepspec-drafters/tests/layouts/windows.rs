//! The keys of `dflash_config` that give draft layers a sliding window.

use deepspec_checkpoint::{CheckpointFormat, Engine, SWA_WINDOW_SIZE, Target, USE_SWA, convert_for_engine};
use deepspec_checkpoint::{GgufExport, engine_compatibility};
use deepspec_drafters::{DSparkConfig, DrafterOptions, load_drafter, open_checkpoint};
use serde_json::{Value, json};
use tch::{Device, Kind};

use crate::common::{Folder, bytes, edited, fixture, golden, target};
use crate::convert::{converted, refusal};

const WINDOW: u64 = 64;

/// The drafter with these keys within `dflash_config`, and these beside it.
fn with(folder: &Folder, inner: Value, outer: Value) -> Folder {
    edited(folder, |config| {
        for (key, value) in outer.as_object().unwrap() {
            config[key] = value.clone();
        }
        for (key, value) in inner.as_object().unwrap() {
            config["dflash_config"][key] = value.clone();
        }
    })
}

fn use_swa(folder: &Folder) -> Folder {
    with(folder, json!({USE_SWA: true, SWA_WINDOW_SIZE: WINDOW}), json!({}))
}

/// Windows of the layers of a drafter in the reference's layout, as it is loaded.
fn loaded_windows(reference: &Folder) -> Vec<Option<usize>> {
    let options = DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, target: None };
    load_drafter(reference.path(), &options).map(|_| ()).unwrap();
    let config = DSparkConfig::load(reference.path()).unwrap();
    config.model().layers.iter().map(|layer| layer.attention.window).collect()
}

#[test]
fn use_swa_is_read_and_written_for_tools_and_engines() {
    let (vanilla, zlab) = (golden("dspark_vanilla"), fixture::zlab());
    let target = target(&vanilla);
    for (from, to) in [(&zlab, CheckpointFormat::Zlab), (&vanilla, CheckpointFormat::Specforge)] {
        let windowed = use_swa(from);
        let theirs = match to {
            CheckpointFormat::Zlab => windowed,
            // The reference's layout may have the keys too, as Nemotron's drafters do.
            _ => {
                assert_eq!(loaded_windows(&windowed), [Some(64), Some(64)]);
                converted(&windowed, to, Some(&target))
            }
        };
        let reference = converted(&theirs, CheckpointFormat::Reference, Some(&target));
        let config = reference.config();
        assert_eq!(config["layer_types"], json!(["sliding_attention", "sliding_attention"]));
        assert_eq!(
            (&config["use_sliding_window"], &config["sliding_window"]),
            (&json!(true), &json!(WINDOW))
        );
        assert_eq!(loaded_windows(&reference), [Some(64), Some(64)]);
        let back = converted(&reference, to, Some(&target));
        let config = back.config();
        assert_eq!(config["layer_types"], json!(["full_attention", "full_attention"]));
        let inner = &config["dflash_config"];
        assert_eq!((&inner[USE_SWA], &inner[SWA_WINDOW_SIZE]), (&json!(true), &json!(WINDOW)));
        assert_eq!(bytes(&back), bytes(&theirs));
        let again = converted(&back, CheckpointFormat::Reference, Some(&target));
        assert_eq!(again.config(), reference.config());

        let checkpoint = open_checkpoint(reference.path()).unwrap();
        let at = Target::open(target.path(), "owner/target").unwrap();
        let vllm = convert_for_engine(&checkpoint, Engine::Vllm, &at).unwrap();
        assert_eq!(vllm.config()["dflash_config"][SWA_WINDOW_SIZE], json!(WINDOW));
        assert_eq!(vllm.config()["layer_types"], json!(["full_attention", "full_attention"]));
        let sglang = convert_for_engine(&checkpoint, Engine::Sglang, &at).map(|_| ()).unwrap_err();
        assert!(sglang.to_string().contains("SGLang does not read use_swa"), "{sglang}");
        let gguf = GgufExport::plan(&checkpoint, &at, None).map(|_| ()).unwrap_err();
        assert!(gguf.to_string().contains("sliding windows are not written"), "{gguf}");
        let told = refusal(&reference, CheckpointFormat::Speculators, Some(&target));
        assert!(told.contains("speculators has no key for a sliding window"), "{told}");
        // vLLM would take layers that `layer_types` marks for causal ones.
        for (folder, loads) in [(&reference, false), (&back, true)] {
            let engines = engine_compatibility(&open_checkpoint(folder.path()).unwrap());
            let found = |name: &str| engines.iter().find(|engine| engine.engine == name).unwrap();
            assert_eq!((found("vLLM").loads, found("SGLang").loads), (loads, false));
        }
    }
}

/// Whether the engine loads the folder, and the note on it. It was not tried with windows.
fn told_of(engine: Engine, folder: &Folder) -> (bool, String) {
    let engines = engine_compatibility(&open_checkpoint(folder.path()).unwrap());
    let found = engines.into_iter().find(|found| found.engine == engine.to_string()).unwrap();
    assert_eq!(found.tried, None, "{}", found.note);
    (found.loads, found.note)
}

#[test]
fn inspect_says_which_windows_engines_read() {
    let (vanilla, sliding) = (golden("dspark_vanilla"), json!("sliding_attention"));
    let marked = |types: [&Value; 2], keys: Value| {
        let marks = json!({"use_sliding_window": true, "sliding_window": WINDOW, "layer_types": types});
        with(&with(&vanilla, json!({}), marks), json!({}), keys)
    };
    let (vllm, sglang) = (Engine::Vllm, Engine::Sglang);
    assert!(told_of(vllm, &use_swa(&vanilla)).0);
    let (loads, note) = told_of(sglang, &use_swa(&vanilla));
    assert!(!loads && note == "it does not read use_swa", "{note}");
    for engine in [vllm, sglang] {
        let (loads, note) = told_of(engine, &marked([&sliding, &sliding], json!({})));
        assert!(!loads && note.contains("layer_types marks for causal ones"), "{note}");
        assert_eq!(note.ends_with("; convert to vllm"), engine == vllm, "{note}");
        // No layout has whole blocks and windows in some layers.
        let (loads, note) = told_of(engine, &marked([&sliding, &json!("full_attention")], json!({})));
        assert!(!loads && note.ends_with("layer_types marks for causal ones"), "{note}");
        for causal in [false, true] {
            assert!(told_of(engine, &marked([&sliding, &sliding], json!({"is_causal": causal}))).0);
        }
        // Windows of DFlash 2 are not converted.
        let marks =
            json!({"use_sliding_window": true, "sliding_window": WINDOW, "layer_types": [sliding, sliding]});
        for (keys, remedy) in
            [(json!({}), format!("; convert to {}", engine.export_name())), (marks, String::new())]
        {
            let (loads, note) = told_of(engine, &with(&golden("dflash2"), json!({}), keys));
            assert_eq!((loads, note), (false, format!("the class is not registered{remedy}")));
        }
    }
}

#[test]
fn use_swa_means_what_it_means_in_vllm() {
    let (zlab, target) = (fixture::zlab(), target(&golden("dflash")));
    let mixed = json!(["sliding_attention", "full_attention"]);
    let read = |inner: Value, outer: Value| {
        loaded_windows(&converted(&with(&zlab, inner, outer), CheckpointFormat::Reference, Some(&target)))
    };
    let size = json!({USE_SWA: true, SWA_WINDOW_SIZE: WINDOW});
    for (inner, outer, windows) in [
        (size.clone(), json!({"layer_types": null}), [Some(64), Some(64)]),
        (json!({USE_SWA: false, SWA_WINDOW_SIZE: WINDOW}), json!({}), [None, None]),
        (json!({USE_SWA: false}), json!({}), [None, None]),
        // A window of transformers stands in for a missing one, and is ignored if it is off.
        (
            json!({USE_SWA: true}),
            json!({"use_sliding_window": true, "sliding_window": 32}),
            [Some(32), Some(32)],
        ),
        (size.clone(), json!({"use_sliding_window": false, "sliding_window": 32}), [Some(64), Some(64)]),
        (size.clone(), json!({"sliding_window": WINDOW, "is_causal": true}), [Some(64), Some(64)]),
        // Layers that `layer_types` marks are the only ones.
        (size.clone(), json!({"layer_types": mixed, "is_causal": true}), [Some(64), None]),
        (size.clone(), json!({"layer_types": mixed, "is_causal": false}), [Some(64), None]),
        (
            json!({USE_SWA: false, SWA_WINDOW_SIZE: WINDOW, "causal": true}),
            json!({"layer_types": mixed}),
            [Some(64), None],
        ),
    ] {
        assert_eq!(read(inner.clone(), outer.clone()), windows, "{inner} {outer}");
    }
    let causal = with(&zlab, json!({USE_SWA: true, SWA_WINDOW_SIZE: 2, "causal": true}), json!({}));
    let reference = converted(&causal, CheckpointFormat::Reference, Some(&target));
    assert_eq!(loaded_windows(&reference), [Some(2), Some(2)]);
    // No other layout has windows in some layers.
    let some = with(&zlab, size, json!({"layer_types": mixed, "is_causal": false}));
    let reference = converted(&some, CheckpointFormat::Reference, Some(&target));
    assert!(refusal(&reference, CheckpointFormat::Zlab, Some(&target)).contains("layer_types"));
}

#[test]
fn contradicting_keys_of_windows_are_refused_by_name() {
    let (zlab, ours) = (fixture::zlab(), golden("dspark_vanilla"));
    let size = json!({USE_SWA: true, SWA_WINDOW_SIZE: WINDOW});
    for (inner, outer, words) in [
        (json!({USE_SWA: true}), json!({}), "`dflash_config.swa_window_size`: missing"),
        (json!({USE_SWA: true}), json!({"sliding_window": 32}), "`dflash_config.swa_window_size`: missing"),
        (size.clone(), json!({"sliding_window": 32}), "64, but sliding_window is 32"),
        (json!({USE_SWA: 1, SWA_WINDOW_SIZE: 64}), json!({}), "`dflash_config.use_swa`"),
        (json!({USE_SWA: true, SWA_WINDOW_SIZE: 0}), json!({}), "`dflash_config.swa_window_size`"),
        (json!({USE_SWA: true, SWA_WINDOW_SIZE: 4}), json!({}), "4 is less than the block size 5"),
        (size.clone(), json!({"layer_types": ["full_attention"]}), "1 types for 2 layers"),
        (size.clone(), json!({"layer_types": ["full_attention", "linear_attention"]}), "linear_attention"),
        (size, json!({"layer_types": ["sliding_attention", "full_attention"]}), "add `is_causal`"),
    ] {
        // The golden config says that its window is off.
        let outer =
            with(&edited(&zlab, |config| config["use_sliding_window"] = Value::Null), json!({}), outer);
        let told = open_checkpoint(with(&outer, inner.clone(), json!({})).path()).map(|_| ()).unwrap_err();
        assert!(told.to_string().contains(words), "{told}");
        if outer.config()["layer_types"] == ours.config()["layer_types"] {
            let mut settings = outer.config();
            settings.as_object_mut().unwrap().retain(|key, _| key.contains("sliding"));
            let ours = with(&ours, inner, settings);
            let told = open_checkpoint(ours.path()).map(|_| ()).unwrap_err().to_string();
            assert!(told.contains(words), "{told}");
            let told = DSparkConfig::load(ours.path()).map(|_| ()).unwrap_err().to_string();
            assert!(told.contains(words), "{told}");
        }
    }
    let llama = with(&zlab, json!({USE_SWA: true, SWA_WINDOW_SIZE: WINDOW}), json!({"model_type": "llama"}));
    let told = open_checkpoint(llama.path()).map(|_| ()).unwrap_err().to_string();
    assert!(told.contains("`model_type`") && told.contains("Qwen3"), "{told}");
}

#[test]
fn kinds_without_these_keys_refuse_them() {
    for case in ["dflash2", "domino"] {
        let (from, to) = match case {
            "dflash2" => (golden(case), CheckpointFormat::Zlab),
            _ => (golden(case), CheckpointFormat::Modelopt),
        };
        let target = target(&from);
        let theirs = use_swa(&converted(&from, to, Some(&target)));
        let told = refusal(&theirs, CheckpointFormat::Reference, Some(&target));
        assert!(
            told.contains("`dflash_config.use_swa`") && told.contains("DSpark and DFlash only"),
            "{told}"
        );
    }
}
