//! Pre-tokenizers of byte-level BPE. llama.cpp identifies them by name, tokenizer.json by their
//! regular expressions.

use serde_json::{Value as Json, json};

const GPT2_PATTERN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const QWEN2_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A pre-tokenizer.
#[derive(Debug)]
pub(crate) struct PreTokenizer {
    /// Names in llama.cpp. The first one is written; the others occur in files of other models.
    names: &'static [&'static str],
    pattern: &'static str,
    /// Whether each digit is split off before the pattern is applied.
    single_digits: bool,
    /// Whether a word that is itself a token becomes that token without applying merges.
    ignores_merges: bool,
    /// Whether texts are first normalised to Unicode NFC. llama.cpp does not normalise, so its
    /// tokens differ for other texts.
    nfc: bool,
}

static PRE_TOKENIZERS: [PreTokenizer; 5] = [
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen"],
        pattern: QWEN2_PATTERN,
        single_digits: false,
        ignores_merges: false,
        nfc: true,
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3"],
        pattern: LLAMA3_PATTERN,
        single_digits: false,
        ignores_merges: true,
        nfc: false,
    },
    PreTokenizer {
        names: &["smaug-bpe", "dbrx"],
        pattern: LLAMA3_PATTERN,
        single_digits: false,
        ignores_merges: false,
        nfc: false,
    },
    PreTokenizer {
        names: &["smollm", "starcoder", "refact"],
        pattern: GPT2_PATTERN,
        single_digits: true,
        ignores_merges: false,
        nfc: false,
    },
    PreTokenizer {
        names: &["gpt-2", "phi-2"],
        pattern: GPT2_PATTERN,
        single_digits: false,
        ignores_merges: false,
        nfc: false,
    },
];

impl PreTokenizer {
    /// The pre-tokenizer that llama.cpp calls `name`.
    pub fn from_llama_cpp_name(name: &str) -> Option<&'static Self> {
        PRE_TOKENIZERS.iter().find(|known| known.names.contains(&name))
    }

    /// All names that llama.cpp has for known pre-tokenizers.
    pub fn known_names() -> Vec<&'static str> {
        PRE_TOKENIZERS.iter().flat_map(|known| known.names).copied().collect()
    }

    /// Finds the pre-tokenizer that a tokenizer.json's `pre_tokenizer` describes.
    pub fn from_json(pre: &Json) -> Option<&'static Self> {
        let steps = pre["pretokenizers"].as_array().map_or(std::slice::from_ref(pre), Vec::as_slice);
        let said = |step: &&Json| step["type"] == "ByteLevel" && step["use_regex"].as_bool().unwrap_or(true);
        let pattern = steps.iter().find_map(|step| step["pattern"]["Regex"].as_str());
        let pattern = pattern.or_else(|| steps.iter().find(said).map(|_| GPT2_PATTERN))?;
        let digits = |step: &Json| step["type"] == "Digits" && step["individual_digits"] == true;
        let single_digits = steps.iter().any(digits);
        PRE_TOKENIZERS.iter().find(|known| known.pattern == pattern && known.single_digits == single_digits)
    }

    /// The name to write for llama.cpp.
    pub fn name(&self) -> &'static str {
        self.names[0]
    }

    /// `ignore_merges` in the `model` of a tokenizer.json.
    pub fn ignores_merges(&self) -> bool {
        self.ignores_merges
    }

    /// The tokenizer.json's `normalizer`.
    pub fn normalizer_json(&self) -> Json {
        if self.nfc { json!({"type": "NFC"}) } else { Json::Null }
    }

    /// The tokenizer.json's `pre_tokenizer`.
    pub fn to_json(&self) -> Json {
        let digits = self.single_digits.then(|| json!({"type": "Digits", "individual_digits": true}));
        let split = json!({
            "type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": false,
        });
        let bytes = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
        });
        let steps: Vec<Json> = digits.into_iter().chain([split, bytes]).collect();
        json!({"type": "Sequence", "pretokenizers": steps})
    }
}
