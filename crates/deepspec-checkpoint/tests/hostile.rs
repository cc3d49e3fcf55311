//! Damaged files never cause a panic, and every error names the file and the problem.

use std::fs;
use std::path::Path;

use deepspec_checkpoint::gguf::{GgufFile, Model, Tensor, TensorType, Value, Writer, unpack};
use deepspec_core::rng::{Purpose, Stream};

const WIDTH: usize = 8;
const TOKENS: [&str; 6] = ["a", "b", "ab", "<|end|>", "c", "[PAD5]"];

/// A Llama of one layer, with two heads.
fn written(edit: impl FnOnce(&mut Vec<(&'static str, Value)>)) -> Vec<u8> {
    let mut entries = vec![
        ("general.architecture", Value::Text("llama".into())),
        ("llama.block_count", Value::U32(1)),
        ("llama.context_length", Value::U32(64)),
        ("llama.embedding_length", Value::U32(WIDTH as u32)),
        ("llama.feed_forward_length", Value::U32(16)),
        ("llama.attention.head_count", Value::U32(2)),
        ("llama.attention.head_count_kv", Value::U32(1)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.rope.freq_base", Value::F32(10_000.0)),
        ("llama.rope.dimension_count", Value::U32(4)),
        ("tokenizer.ggml.model", Value::Text("gpt2".into())),
        ("tokenizer.ggml.pre", Value::Text("smollm".into())),
        ("tokenizer.ggml.tokens", Value::Texts(TOKENS.map(String::from).to_vec())),
        ("tokenizer.ggml.token_type", Value::Integers(vec![1, 1, 1, 3, 4, 5])),
        ("tokenizer.ggml.merges", Value::Texts(vec!["a b".into()])),
        ("tokenizer.ggml.eos_token_id", Value::U32(3)),
        ("tokenizer.chat_template", Value::Text("{{ messages[0].content }}".into())),
    ];
    edit(&mut entries);
    let mut writer = Writer::default();
    entries.into_iter().for_each(|(key, value)| writer.put(key, value));
    let tensors = [
        ("token_embd.weight", vec![TOKENS.len(), WIDTH]),
        ("output_norm.weight", vec![WIDTH]),
        ("blk.0.attn_norm.weight", vec![WIDTH]),
        ("blk.0.attn_q.weight", vec![8, WIDTH]),
        ("blk.0.attn_k.weight", vec![4, WIDTH]),
        ("blk.0.attn_v.weight", vec![4, WIDTH]),
        ("blk.0.attn_output.weight", vec![WIDTH, 8]),
        ("blk.0.ffn_norm.weight", vec![WIDTH]),
        ("blk.0.ffn_gate.weight", vec![16, WIDTH]),
        ("blk.0.ffn_up.weight", vec![16, WIDTH]),
        ("blk.0.ffn_down.weight", vec![WIDTH, 16]),
    ];
    for (name, shape) in tensors {
        writer.tensor(Tensor { name: name.into(), kind: TensorType::F32, shape });
    }
    let mut bytes = vec![];
    // Each value equals its index.
    let data = |_, tensor: &Tensor| {
        Ok((0..tensor.bytes() / 4).flat_map(|value| (value as f32).to_le_bytes()).collect())
    };
    writer.write(&mut bytes, data).unwrap();
    bytes
}

/// Reads the whole file; an error must name it.
fn read(path: &Path, cache: &Path) -> Result<(), String> {
    let all = || {
        unpack(path, cache)?;
        let model = Model::open(path)?;
        let names: Vec<String> = model.tensors().map(|(name, _)| name.to_string()).collect();
        names.iter().try_for_each(|name| model.values(name).map(drop))
    };
    all().map_err(|error| {
        let text = error.to_string();
        assert!(text.contains(path.to_str().unwrap()) || text.contains(cache.to_str().unwrap()), "{text}");
        text
    })
}

fn told(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    read(&path, dir.path()).unwrap_err()
}

#[test]
fn a_model_is_unpacked_once_and_heads_become_halves() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::write(&path, written(|_| ())).unwrap();
    let folder = unpack(&path, dir.path()).unwrap();
    assert_eq!(unpack(&path, dir.path()).unwrap(), folder);
    let model = Model::open(&folder.join(deepspec_checkpoint::gguf::GGUF_LINK)).unwrap();
    let values = model.values("model.layers.0.self_attn.q_proj.weight").unwrap();
    let first_of_rows: Vec<f32> =
        values.chunks(WIDTH * 4).map(|row| f32::from_le_bytes([row[0], row[1], row[2], row[3]])).collect();
    // Two heads of four rows: the even rows, then the odd ones.
    assert_eq!(first_of_rows, [0.0, 16.0, 8.0, 24.0, 32.0, 48.0, 40.0, 56.0]);
    let json = |file: &str| -> serde_json::Value {
        serde_json::from_slice(&fs::read(folder.join(file)).unwrap()).unwrap()
    };
    assert_eq!(json("config.json")["rms_norm_eps"], 1e-5);
    assert_eq!(json("config.json")["tie_word_embeddings"], true);
    assert_eq!(json("generation_config.json")["eos_token_id"], serde_json::json!([3]));
    assert_eq!(json("tokenizer_config.json")["eos_token"], "<|end|>");
    let vocabulary = json("tokenizer.json")["model"]["vocab"].clone();
    assert!(vocabulary.get("[PAD5]").is_none() && vocabulary["c"] == 4);
    assert_eq!(json("tokenizer.json")["added_tokens"].as_array().unwrap().len(), 2);
}

#[test]
fn what_cannot_be_read_is_named() {
    let put = |key: &'static str, value: Value| {
        told(&written(|entries| {
            entries.retain(|(known, _)| *known != key);
            entries.push((key, value));
        }))
    };
    let text = |text: &str| Value::Text(text.into());
    for (key, value, expected) in [
        ("general.architecture", text("gemma4"), "gemma4 is not an architecture"),
        ("tokenizer.ggml.model", text("llama"), "llama; byte-level BPE"),
        ("tokenizer.ggml.pre", text("tekken"), "tekken is not a split"),
        ("tokenizer.ggml.merges", Value::Texts(vec!["a c".into()]), "\"a c\" merges no two tokens"),
        ("tokenizer.ggml.token_type", Value::Integers(vec![1]), "1 for 6 tokens"),
        ("tokenizer.ggml.eos_token_id", Value::U32(6), "6 of a vocabulary of 6"),
        ("llama.rope.scaling.type", text("longrope"), "longrope is not read"),
        ("llama.attention.head_count", Value::U32(3), "heads are 2 wide"),
        ("llama.attention.head_count", Value::U32(0), "0; expected 1 or more"),
        ("llama.block_count", Value::U32(4_000_000_000), "4000000000 layers in 11 tensors"),
        ("llama.expert_count", Value::U32(8), "8; such models are not read"),
        ("llama.feed_forward_length", text("x"), "a text; expected an integer"),
        ("llama.rope.scale_linear", Value::F32(2.0), "2; expected rope.scaling"),
        ("split.count", Value::U32(2), "one part of several"),
        ("general.alignment", Value::U32(12), "no multiple of 8"),
    ] {
        let told = put(key, value);
        assert!(
            told.contains(expected)
                && (told.contains(key) || key == "split.count" || key.contains("head_count")),
            "{key}: {told}"
        );
    }
    let whole = written(|_| ());
    let magic = [b"GGML", &whole[4..]].concat();
    assert!(told(&magic).contains("does not begin with `GGUF`"));
    assert!(told(&whole[..whole.len() - 64]).contains("truncated"));
    let version = |version: u32| [&whole[..4], &version.to_le_bytes(), &whole[8..]].concat();
    assert!(told(&version(9)).contains("GGUF version 9"));
    assert!(told(&version(3u32.swap_bytes())).contains("big-endian"));
}

#[test]
fn types_that_are_not_read_are_named_with_those_that_are() {
    let whole = written(|_| ());
    let tensor = b"blk.0.attn_q.weight";
    let name = whole.windows(tensor.len()).position(|bytes| bytes == tensor).unwrap();
    // After the name come the number of dimensions, two dimensions, and the type.
    let place = name + tensor.len() + 4 + 2 * 8;
    for (id, kind) in [
        (15u32, "Q8_K"),
        (16, "IQ2_XXS"),
        (19, "IQ1_S"),
        (21, "IQ3_S"),
        (24, "I8"),
        (35, "TQ2_0"),
        (39, "MXFP4"),
        (999, "999"),
    ] {
        let mut bytes = whole.clone();
        bytes[place..place + 4].copy_from_slice(&id.to_le_bytes());
        let told = told(&bytes);
        let words = ["blk.0.attn_q.weight", &format!("type {kind}, which is not read"), "Q4_K", "Q8_0"];
        assert!(words.iter().all(|word| told.contains(word)), "{words:?} in {told}");
    }
}

#[test]
fn two_thousand_damaged_files_are_refused_or_read() {
    let whole = written(|_| ());
    // Damage is noticed before the tensors' values, which may be anything.
    let data = [48, 8, 8, 64, 32, 32, 64, 8, 128, 128, 128].map(|values| 4 * values);
    let head = whole.len() - data.iter().sum::<usize>();
    let dice = Stream::new(5, "gguf");
    let (dir, mut refused) = (tempfile::tempdir().unwrap(), 0);
    let path = dir.path().join("model.gguf");
    for round in 0..2000 {
        let mut bytes = whole.clone();
        let roll = |sides: usize, lane| dice.below(sides as u64, round, Purpose::Shuffle, lane) as usize;
        let at = roll(head, 0);
        match roll(4, 1) {
            // A changed byte; a number of eight bytes that is far too large, or larger than the
            // rest of the file; a truncated file.
            0 => bytes[at] = roll(256, 2) as u8,
            1 => bytes.splice(at..(at + 8).min(whole.len()), u64::MAX.to_le_bytes()).for_each(drop),
            2 => {
                bytes.splice(at..(at + 8).min(whole.len()), (whole.len() as u64).to_le_bytes()).for_each(drop)
            }
            _ => bytes.truncate(at),
        }
        fs::write(&path, &bytes).unwrap();
        let cache = dir.path().join(round.to_string());
        refused += usize::from(read(&path, &cache).is_err());
        let _ = fs::remove_dir_all(&cache);
    }
    assert!(refused > 1700, "{refused} refused");
}

#[test]
fn a_file_that_is_no_file_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent.gguf");
    assert!(GgufFile::open(&absent).unwrap_err().to_string().contains("absent.gguf: reading it"));
    fs::write(&absent, "").unwrap();
    assert!(GgufFile::open(&absent).unwrap_err().to_string().contains("not a GGUF file"));
}

/// A sparse file with a huge size: its claims alone must not cause an allocation.
#[test]
fn texts_of_a_huge_file_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("huge.gguf");
    let mut head = b"GGUF".to_vec();
    head.extend(3u32.to_le_bytes());
    // No tensors, and one entry whose key has 900 GiB.
    head.extend([0u64, 1, 900 << 30].map(u64::to_le_bytes).as_flattened());
    fs::write(&path, head).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(1000 << 30).unwrap();
    let told = GgufFile::open(&path).err().unwrap().to_string();
    assert!(told.contains("huge.gguf") && told.contains("texts of more than"), "{told}");
}
