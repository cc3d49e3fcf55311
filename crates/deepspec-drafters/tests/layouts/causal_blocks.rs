//! The keys by which tools mark causal blocks.

use deepspec_checkpoint::{CAUSAL_KEYS, CheckpointFormat};
use deepspec_drafters::open_checkpoint;
use serde_json::json;

use crate::common::{Folder, edited, fixture, golden, target};
use crate::convert::{converted, refusal};

#[test]
fn causal_blocks_are_read_in_every_spelling_and_written_for_engines() {
    let target = target(&golden("dspark_vanilla"));
    let with = |folder: &Folder, key: &str, causal: bool, inner: bool| {
        edited(folder, |config| {
            let place = if inner { &mut config["dflash_config"] } else { config };
            place[key] = json!(causal);
        })
    };
    for (key, inner) in CAUSAL_KEYS.into_iter().flat_map(|key| [(key, false), (key, true)]) {
        let zlab = with(&fixture::zlab(), key, true, inner);
        let reference = converted(&zlab, CheckpointFormat::Reference, Some(&target));
        assert_eq!(reference.config()["is_causal"], true, "{key}");
        let back = converted(&reference, CheckpointFormat::Zlab, Some(&target)).config();
        assert_eq!([&back["is_causal"], &back["dflash_config"]["causal_head"]], [true, true]);
        assert!(
            refusal(&zlab, CheckpointFormat::Speculators, Some(&target)).contains("no key for causal blocks")
        );
        let contradiction = open_checkpoint(with(&zlab, key, false, !inner).path()).map(|_| ());
        let told = contradiction.unwrap_err().to_string();
        assert!(told.contains(key) && told.contains(" is "), "{told}");
    }
    for to in [CheckpointFormat::Specforge, CheckpointFormat::Modelopt] {
        let causal = with(&golden("dspark_vanilla"), "is_causal", true, false);
        for (folder, expected) in [(causal, true), (golden("dspark_vanilla"), false)] {
            let config = converted(&folder, to, Some(&target)).config();
            assert_eq!(config["is_causal"] == json!(true), expected, "{to}");
            assert_eq!(config["dflash_config"]["causal"] == json!(true), expected, "{to}");
        }
    }
    // Also z-lab's DFlash 2 does not lose the mark.
    let zlab = converted(
        &golden("dflash2"),
        CheckpointFormat::Zlab,
        Some(&crate::common::target(&golden("dflash2"))),
    );
    for inner in [false, true] {
        let zlab = with(&zlab, "is_causal", true, inner);
        let told = open_checkpoint(zlab.path()).map(|_| ()).unwrap_err().to_string();
        assert!(told.contains("is_causal") && told.contains("not supported"), "{told}");
    }
    // speculators has no key for causal blocks, so a file that has one is not converted.
    let foreign = converted(&golden("dspark_vanilla"), CheckpointFormat::Speculators, Some(&target));
    let nested = edited(&foreign, |config| config["transformer_layer_config"]["is_causal"] = json!(true));
    for foreign in [nested, with(&foreign, "is_causal", true, false)] {
        assert!(refusal(&foreign, CheckpointFormat::Reference, Some(&target)).contains("is_causal"));
    }
}
