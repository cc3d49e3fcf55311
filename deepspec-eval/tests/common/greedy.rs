//! Answers of runs, and their comparison at temperature 0 up to ties.

use std::path::Path;
use std::sync::OnceLock;

use deepspec_core::jsonl::{Line, Reader};
use deepspec_engine::{ModelInput, Target};
use deepspec_models::TargetModel;
use deepspec_text::{ChatTokenizer, Message, Role, generation_prompt};
use tch::Tensor;

use super::{Answers, answers, repository, run_ok, target, target_dir};

/// A decision within this margin may go either way.
pub const TIE: f64 = 1e-4;

/// Prompts of each suite that [`changes_no_token`] answers.
const SHORT_ROWS: usize = 16;

pub fn generate(draft: Option<&Path>, slots: usize, temperature: &str, more: &[&str]) -> Answers {
    let dir = tempfile::tempdir().unwrap();
    let slots = slots.to_string();
    let mut args = vec!["--no-baseline", "--temperature", temperature, "--max-num-seqs", &slots];
    args.extend(more);
    run_ok(draft.map_or("none", |dir| dir.to_str().unwrap()), dir.path(), &args);
    answers(dir.path())
}

/// Ids whose answers differ; both runs must have answered the same samples.
pub fn parted<'a>(a: &'a Answers, b: &Answers) -> Vec<&'a str> {
    assert!(a.len() >= 3 * SHORT_ROWS, "{} answers show little", a.len());
    assert!(a.keys().eq(b.keys()));
    a.iter().filter(|(id, tokens)| b[*id] != **tokens).map(|(id, _)| id.as_str()).collect()
}

/// Index of the first token that differs.
pub fn parting(a: &[i64], b: &[i64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// At most one sample in a thousand may differ.
pub fn assert_rare(parted: usize, compared: usize) {
    eprintln!("{parted} of {compared} samples parted, all at ties");
    assert!(parted * 1000 <= compared, "that is too many");
}

/// The prompt of `suite/row` as in the evaluation.
pub fn prompt(tokenizer: &ChatTokenizer, id: &str) -> Vec<i64> {
    let (suite, row) = id.split_once('/').unwrap();
    let mut lines = Reader::open(&repository(&format!("eval_datasets/{suite}.jsonl"))).unwrap();
    let text = lines.find_map(|line| match line.unwrap() {
        Line::Row(_, fields) if fields["id"] == row => Some(fields["turns"][0].as_str().unwrap().to_string()),
        _ => None,
    });
    generation_prompt(tokenizer, &[Message::new(Role::User, text.unwrap())], None, Some(false)).unwrap()
}

/// The target's logits after each of the last `count` of `ids`, from one forward.
pub fn last_logits(target: &mut TargetModel, ids: &[i64], count: usize) -> Tensor {
    target.truncate(0, 0);
    let fed = ModelInput { chunks: &[(0, ids.len())], tokens: Tensor::from_slice(ids) };
    let hidden = tch::no_grad(|| target.forward(&fed)).hidden;
    target.logits(&hidden.narrow(0, (ids.len() - count) as i64, count as i64))
}

/// The difference of the two largest values of `logits [V]`.
pub fn gap_of_best(logits: &Tensor) -> f64 {
    let best = logits.topk(2, -1, true, true).0;
    best.double_value(&[0]) - best.double_value(&[1])
}

/// Checks that drafting at temperature 0 changes no token, in runs of (sequences at once, further arguments).
pub fn changes_no_token(drafter: &Path, runs: &[(usize, &[&str])]) {
    let tokenizer = ChatTokenizer::load(&target_dir()).unwrap();
    let mut target = target(1, &[]);
    // With an untrained drafter, every token needs a whole cycle.
    let rows = SHORT_ROWS.to_string();
    let short = ["--max-new-tokens", "64", "--limit", &rows];
    static PLAIN: OnceLock<Answers> = OnceLock::new();
    let plain = PLAIN.get_or_init(|| generate(None, 1, "0", &short));
    let (mut compared, mut ties) = (0, 0);
    for &(slots, args) in runs {
        let found = generate(Some(drafter), slots, "0", &[&short[..], args].concat());
        compared += plain.len();
        for id in parted(plain, &found) {
            let at = parting(&plain[id], &found[id]);
            let common = [prompt(&tokenizer, id), plain[id][..at].to_vec()].concat();
            let gap = gap_of_best(&last_logits(&mut target, &common, 1).get(0));
            assert!(
                gap < TIE,
                "{slots} slots, {args:?}: {id} parts at token {at}, the best two are {gap:.2e} apart"
            );
            ties += 1;
        }
    }
    assert_rare(ties, compared);
}
