//! Conversations are tokenised once, into a shared file that is checked on every use and written
//! again if it is not valid.

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::thread;

use common::Bench;
use deepspec_capture::cache::PlannedSample;
use deepspec_capture::{Dataset, TargetSpec, tokenise};
use deepspec_drafters::Recipe;
use serde_json::json;

const SAMPLES: usize = 40;

fn bench() -> Bench {
    let bench = Bench::new();
    let row = |index: usize| {
        let answer = (0..9 + index % 7).map(|word| format!("word {word} of {index}. ")).collect::<String>();
        let turns = [
            json!({"role": "user", "content": format!("Say {index}, ünïcode too.")}),
            json!({"role": "assistant", "content": answer}),
        ];
        json!({"id": format!("røw-{index}"), "conversations": turns}).to_string()
    };
    let mut rows: Vec<String> = (0..SAMPLES).map(row).collect();
    rows.insert(3, "nonsense".into());
    rows.push(row(5));
    bench.write("rows.jsonl", &rows.join("\n"));
    bench
}

fn online(bench: &Bench, file: &str) -> Recipe {
    let input = format!("data.input=['{}']", bench.path(file).display());
    bench.recipe(&["data.states=online", &input])
}

fn open(bench: &Bench, recipe: &Recipe, source: &TargetSpec) -> Dataset {
    Dataset::open(recipe, source, Some(&bench.path("kept")), |_| vec![]).unwrap()
}

/// The files of tokenised samples.
fn kept(bench: &Bench) -> Vec<PathBuf> {
    let files = fs::read_dir(bench.path("kept")).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|file| file.extension().is_some_and(|extension| extension == "samples")).collect()
}

fn kept_one(bench: &Bench) -> PathBuf {
    let [file] = &kept(bench)[..] else { panic!("{:?}", kept(bench)) };
    file.clone()
}

#[track_caller]
fn assert_holds(dataset: &Dataset, expected: &[PlannedSample]) {
    assert_eq!(dataset.len(), expected.len());
    for (index, expected) in expected.iter().enumerate() {
        let facts = dataset.meta(index);
        assert_eq!(
            (&*facts.id, &*facts.input_ids, &*facts.spans),
            (&expected.id[..], &expected.input_ids[..], &expected.spans[..])
        );
        assert_eq!(dataset.length(index), expected.input_ids.len());
    }
    let longest = expected.iter().map(|sample| sample.input_ids.len()).max().unwrap();
    assert_eq!(dataset.longest(), longest);
}

#[test]
fn one_file_serves_all_who_want_the_same_samples() {
    let bench = bench();
    let source = bench.source(&[]).unwrap();
    let expected = tokenise(&[bench.path("rows.jsonl")], &source, |_| ()).unwrap();
    let first = open(&bench, &online(&bench, "rows.jsonl"), &source);
    assert_holds(&first, &expected.samples);
    assert_eq!(first.report(), Some(&expected.report));
    let written = fs::metadata(kept_one(&bench)).unwrap().ino();

    // Neither the location of the rows nor the taps change the file. But unusable rows are reported
    // with their own location.
    fs::copy(bench.path("rows.jsonl"), bench.path("moved.jsonl")).unwrap();
    let other = bench.source(&["target.layer_ids=[2]"]).unwrap();
    let second = open(&bench, &online(&bench, "moved.jsonl"), &other);
    assert_holds(&second, &expected.samples);
    assert_ne!(first.digest(), second.digest(), "the states are others");
    assert_eq!(second.report().unwrap().rejected[0].file, bench.path("moved.jsonl"));
    assert_eq!(fs::metadata(kept_one(&bench)).unwrap().ino(), written, "it was written again");

    // Every setting that changes the samples leads to a file of its own.
    let shorter = bench.source(&["data.max_length=60"]).unwrap();
    assert!(open(&bench, &online(&bench, "rows.jsonl"), &shorter).longest() == 60);
    let unprompted = bench.source(&["data.system_prompt=''"]).unwrap();
    open(&bench, &online(&bench, "rows.jsonl"), &unprompted);
    let text = fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    bench.write("rows.jsonl", &text.replace("word 1 of 7.", "word 1 of 8."));
    open(&bench, &online(&bench, "rows.jsonl"), &source);
    assert_eq!(kept(&bench).len(), 4);
}

#[test]
fn many_at_once_make_one_file() {
    let bench = bench();
    let (source, recipe) = (bench.source(&[]).unwrap(), online(&bench, "rows.jsonl"));
    let digests: Vec<String> = thread::scope(|scope| {
        let open = || open(&bench, &recipe, &source).digest().to_string();
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(open)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(digests.iter().all(|digest| *digest == digests[0]));
    kept_one(&bench);
    let names = fs::read_dir(bench.path("kept")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.count(), 2, "the samples and their lock");
}

#[test]
fn a_file_that_is_not_what_was_written_is_written_anew() {
    let bench = bench();
    let (source, recipe) = (bench.source(&[]).unwrap(), online(&bench, "rows.jsonl"));
    let expected = tokenise(&[bench.path("rows.jsonl")], &source, |_| ()).unwrap().samples;
    open(&bench, &recipe, &source);
    let file = kept_one(&bench);
    let whole = fs::read(&file).unwrap();
    let renew = |what: &str, bytes: Vec<u8>| {
        fs::remove_file(&file).unwrap();
        fs::write(&file, bytes).unwrap();
        assert_holds(&open(&bench, &recipe, &source), &expected);
        assert!(fs::read(&file).unwrap() == whole, "{what}");
    };
    for place in (0..whole.len()).step_by(whole.len() / 61).chain(whole.len() - 40..whole.len()) {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x10;
        renew(&format!("a bit of byte {place}"), bytes);
    }
    for length in [0, 1, 8, 24, 30, whole.len() / 2, whole.len() - 1] {
        renew(&format!("cut at {length}"), whole[..length].to_vec());
    }
    renew("twice", whole.repeat(2));
    // A valid file for other settings, as if someone had renamed it.
    let shorter = bench.source(&["data.max_length=60"]).unwrap();
    open(&bench, &recipe, &shorter);
    let other = kept(&bench).into_iter().find(|other| *other != file).unwrap();
    renew("another's", fs::read(other).unwrap());
}

#[test]
fn without_a_place_it_is_said_what_to_set() {
    let bench = bench();
    let (source, recipe) = (bench.source(&[]).unwrap(), online(&bench, "rows.jsonl"));
    let error = Dataset::open(&recipe, &source, None, |_| vec![]).err().unwrap().to_string();
    assert!(error.contains("DEEPSPEC_CACHE"), "{error}");
    // A file in place of the folder.
    bench.write("kept", "");
    let error = Dataset::open(&recipe, &source, Some(&bench.path("kept")), |_| vec![]).err().unwrap();
    let error = error.to_string();
    assert!(error.contains("kept") && error.contains("DEEPSPEC_CACHE"), "{error}");
}
