//! Hidden states from a server that behaves like vLLM: they equal the target's own, whatever the
//! server does wrong, or the run ends with a named error. No file is left behind.

mod common;

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use common::Bench;
use common::fake_vllm::{FakeVllm, Fault};
use deepspec_capture::cache::{Builder, Encoding, Plan, PlannedSample, verify};
use deepspec_capture::served::{ServedLimits, ServedTarget};
use deepspec_capture::{
    Capture, Dataset, SampleStates, StateSource, TargetRuntime, TargetSpec, fill_shards,
    fill_shards_from_servers, tokenise,
};
use deepspec_drafters::Recipe;
use deepspec_testkit::server::Server;
use serde_json::json;
use tch::{Device, Kind, Tensor};

const SAMPLES: usize = 17;
/// Layer ids of the bench's taps (embedding, 1, 4) and of the last layer.
const LAYER_IDS: [u32; 4] = [0, 2, 5, 6];
/// Few tokens in flight, so that samples wait for each other.
const LIMITS: ServedLimits = ServedLimits {
    tokens_per_server: 512,
    request: Duration::from_secs(60),
    file: Duration::from_secs(60),
    outage: Duration::from_secs(60),
    leftover_age: std::time::Duration::ZERO,
    attempts: 3,
};

struct Setting {
    bench: Bench,
    folder: PathBuf,
    samples: Vec<PlannedSample>,
    spec: TargetSpec,
}

impl Setting {
    fn new() -> Self {
        tch::set_num_threads(1);
        let bench = Bench::new();
        let row = |index: usize| {
            let answer: Vec<String> =
                (0..3 + index * index % 29).map(|word| format!("word {word} of {index}.")).collect();
            let turns = [
                json!({"role": "user", "content": format!("Say something of length {index}, please.")}),
                json!({"role": "assistant", "content": answer.join(" ")}),
            ];
            json!({"id": format!("row-{index}"), "conversations": turns}).to_string()
        };
        let rows = bench.write("rows.jsonl", &(0..SAMPLES).map(row).collect::<Vec<_>>().join("\n"));
        let spec = bench.source(&[]).unwrap();
        let samples = tokenise(&[rows], &spec, |_| ()).unwrap().samples;
        assert_eq!(samples.len(), SAMPLES);
        Self { folder: bench.path("states"), bench, samples, spec }
    }

    fn start(&self, faults: impl Fn(usize) -> Fault + Send + Sync + 'static) -> (Server, Arc<FakeVllm>) {
        FakeVllm::start(&self.bench.path("target"), &self.folder, &LAYER_IDS, faults)
    }

    fn recipe(&self, servers: &[&Server], storage: &str) -> Recipe {
        let urls: Vec<String> = servers.iter().map(|server| format!("'{}'", server.url())).collect();
        let states = format!(
            "data.states={{{storage}server: [{}], folder: '{}'}}",
            urls.join(", "),
            self.folder.display()
        );
        let input = format!("data.input=['{}']", self.bench.path("rows.jsonl").display());
        match storage.starts_with("cache") {
            true => self.bench.recipe(&[&states]),
            false => self.bench.recipe(&[&states, &input]),
        }
    }

    fn connect(&self, servers: &[&Server]) -> Result<ServedTarget, String> {
        let recipe = self.recipe(servers, "");
        let servers = recipe.data.states.servers.as_ref().unwrap();
        let longest = self.samples.iter().map(|sample| sample.input_ids.len()).max().unwrap();
        ServedTarget::connect(&self.spec, servers, longest, Device::Cpu, LIMITS)
            .map_err(|error| error.to_string())
    }

    /// Requests all samples.
    fn read(&self, servers: &[&Server]) -> Result<Vec<SampleStates>, String> {
        let mut target = self.connect(servers)?;
        self.samples.iter().for_each(|sample| target.submit(sample.clone()));
        let states = self.samples.iter().map(|_| target.next_states());
        states.map(|states| states.map(Option::unwrap).map_err(|error| error.to_string())).collect()
    }

    fn assert_right(&self, states: &[SampleStates]) {
        let mut capture =
            Capture::load(&self.spec.dir, &self.bench.recipe(&[]), 300, Device::Cpu, Kind::Float).unwrap();
        assert_eq!(states.len(), SAMPLES);
        for (sample, found) in self.samples.iter().zip(states) {
            let expected = capture.run(std::slice::from_ref(sample), self.spec.final_states);
            assert_eq!(found.last_positions, sample.last_positions(self.spec.final_states));
            assert_eq!(found.taps, expected.taps, "taps of {}", sample.id);
            // The norm is computed in another order of operations, so a rounding may differ.
            let (last, expected) = (found.last.to_kind(Kind::Float), expected.last.to_kind(Kind::Float));
            assert!(last.allclose(&expected, 1e-2, 1e-6, false), "last states of {}", sample.id);
            let other = last.ne_tensor(&expected).sum(Kind::Int64).int64_value(&[]);
            assert!(other as usize * 100 <= last.numel(), "{other} of {} values", last.numel());
        }
    }

    /// Checks that the folder has no file, except for those of `aborted` requests.
    fn assert_swept(&self, aborted: usize) {
        assert_eq!(fs::read_dir(&self.folder).unwrap().count(), 2 * aborted);
    }
}

#[test]
fn states_are_those_of_the_target() {
    let setting = Setting::new();
    let (server, _fake) = setting.start(|_| Fault::None);
    setting.assert_right(&setting.read(&[&server]).unwrap());
    assert_eq!(server.count(), SAMPLES + 1, "one request a sample, and one for the version");
    setting.assert_swept(0);
}

#[test]
fn a_fault_that_passes_costs_one_more_request() {
    let setting = Setting::new();
    for fault in [
        Fault::NoFile,
        Fault::WrongSlots,
        Fault::EqualSlots,
        Fault::ZeroSlot,
        Fault::OtherTokens,
        Fault::EarlyLayer,
        Fault::Error,
    ] {
        let (server, _fake) = setting.start(move |number| if number == 4 { fault } else { Fault::None });
        setting.assert_right(&setting.read(&[&server]).unwrap());
        assert_eq!(server.count(), SAMPLES + 2, "{fault:?}");
        setting.assert_swept(0);
    }
}

#[test]
fn late_files_are_waited_for() {
    let setting = Setting::new();
    // A loaded engine was seen to write seven seconds late.
    let late = |number| if number == 0 { Duration::from_secs(7) } else { Duration::from_millis(300) };
    let (server, fake) =
        setting.start(move |number| if number % 3 == 0 { Fault::Late(late(number)) } else { Fault::None });
    setting.assert_right(&setting.read(&[&server]).unwrap());
    fake.finish_writes();
    setting.assert_swept(0);
}

#[test]
fn a_fault_that_stays_is_a_named_error() {
    let setting = Setting::new();
    for (fault, words) in [
        (Fault::NoFile, ["without writing the file", "disk may be full"]),
        (Fault::WrongSlots, ["3, 192], expected [", "layer ids"]),
        (Fault::EqualSlots, ["layer ids 5 and 6 are equal", "other layers"]),
        (Fault::ZeroSlot, ["layer id 6 are zero", "0.24"]),
        (Fault::OtherTokens, ["`token_ids`", "not the"]),
        (Fault::EarlyLayer, ["log-probability", "last layer"]),
        (Fault::OutsidePath, ["/etc/states.safetensors", "shared_storage_path"]),
        (Fault::Refused, ["HTTP 400", "the prompt is too long"]),
        (Fault::Error, ["HTTP 500", "3 requests failed"]),
        (Fault::NoConnector, ["no file of states", "connector"]),
    ] {
        let (server, _fake) = setting.start(move |_| fault);
        let error = setting.read(&[&server]).unwrap_err();
        for word in words.into_iter().chain([
            "sample \"row-0\"",
            "vllm serve",
            "\"eagle_aux_hidden_state_layer_ids\":[0,2,5,6]",
        ]) {
            assert!(error.contains(word), "{fault:?}: {word} in {error}");
        }
        assert!(!error.contains('\n'), "{error}");
        setting.assert_swept(0);
    }
}

#[test]
fn an_aborted_request_is_sent_again_and_its_file_swept_by_the_next_run() {
    let setting = Setting::new();
    let (server, _fake) = setting.start(|number| if number == 2 { Fault::Aborted } else { Fault::None });
    setting.assert_right(&setting.read(&[&server]).unwrap());
    setting.assert_swept(1);
    drop(setting.connect(&[&server]).unwrap());
    setting.assert_swept(0);
}

#[test]
fn others_take_over_when_a_server_dies_and_it_is_asked_again() {
    let setting = Setting::new();
    let (first, _fake) = setting.start(|_| Fault::None);
    let (mut second, _other) = setting.start(|_| Fault::None);
    let mut target = setting.connect(&[&first, &second]).unwrap();
    second.die();
    setting.samples.iter().for_each(|sample| target.submit(sample.clone()));
    let states: Vec<SampleStates> =
        setting.samples.iter().map(|_| target.next_states().unwrap().unwrap()).collect();
    setting.assert_right(&states);
    // Alone, the revived server must answer.
    second.revive();
    first.die();
    let before = second.count();
    setting.samples.iter().for_each(|sample| target.submit(sample.clone()));
    let states: Vec<SampleStates> =
        setting.samples.iter().map(|_| target.next_states().unwrap().unwrap()).collect();
    setting.assert_right(&states);
    assert!(second.count() >= before + SAMPLES);
}

#[test]
fn servers_that_cannot_serve_the_recipe_are_refused_at_once() {
    let setting = Setting::new();
    let (server, _fake) = setting.start(|_| Fault::None);
    server.die();
    let error = setting.connect(&[&server]).err().unwrap();
    assert!(error.contains(&server.url()) && error.contains("vllm serve"), "{error}");

    let old = |version: &'static str| {
        Server::start(move |_| deepspec_testkit::server::Reply::Json(json!({"version": version})))
    };
    for (version, word) in [("0.24.1", "zeros for hybrid models"), ("0.23.0", "prefix caching")] {
        let error = setting.connect(&[&old(version)]).err().unwrap();
        assert!(
            error.contains(version) && error.contains("0.25 or newer") && error.contains(word),
            "{error}"
        );
    }
    let error = setting
        .connect(&[&Server::start(|_| deepspec_testkit::server::Reply::Json(json!({})))])
        .err()
        .unwrap();
    assert!(error.contains("expected that of a vLLM server"), "{error}");
}

#[test]
fn a_cache_from_servers_resumes_and_equals_that_of_the_target() {
    let setting = Setting::new();
    let layout = setting.spec.layout(setting.spec.final_states, Encoding::Bf16);
    let plan = Plan::new(setting.samples.clone(), layout, 256 << 10).unwrap();
    assert!(plan.shards().len() > 3);
    let own = setting.bench.path("own");
    let mut builder = Builder::open(&own, &plan, &setting.spec.identity).unwrap();
    let mut capture =
        Capture::load(&setting.spec.dir, &setting.bench.recipe(&[]), 300, Device::Cpu, Kind::Float).unwrap();
    fill_shards(&mut builder, &mut capture, |_| ()).unwrap();
    builder.publish().unwrap();

    // The first attempt ends with an error in the middle; the second one goes on.
    let served = setting.bench.path("served");
    let (broken, _fake) = setting.start(|number| if number < 9 { Fault::None } else { Fault::Refused });
    let mut builder = Builder::open(&served, &plan, &setting.spec.identity).unwrap();
    let mut target = setting.connect(&[&broken]).unwrap();
    assert!(fill_shards_from_servers(&mut builder, &mut target, |_| ()).is_err());
    drop((builder, target));
    setting.assert_swept(0);
    let (server, _fake) = setting.start(|_| Fault::None);
    let mut builder = Builder::open(&served, &plan, &setting.spec.identity).unwrap();
    assert!(builder.done_samples() > 0);
    let mut target = setting.connect(&[&server]).unwrap();
    let mut captured = 0;
    let left = SAMPLES - builder.done_samples();
    fill_shards_from_servers(&mut builder, &mut target, |_| captured += 1).unwrap();
    assert_eq!(captured, left);
    builder.publish().unwrap();
    assert!(verify(&served, |_| ()).unwrap().is_empty());

    // Both caches train alike.
    let states = |dir: &PathBuf| {
        let recipe = setting.bench.recipe(&[&format!("data.states={{cache: '{}'}}", dir.display())]);
        let dataset = Dataset::open(&recipe, &setting.spec, None, |_| vec![]).unwrap();
        let digest = dataset.digest().to_string();
        (digest, read_all(&setting, &dataset, &recipe))
    };
    let ((digest, found), (expected_digest, expected)) = (states(&served), states(&own));
    assert_eq!(digest, expected_digest);
    setting.assert_right(&found);
    setting.assert_right(&expected);
}

#[test]
fn training_reads_states_online_and_hybrid_from_servers() {
    let setting = Setting::new();
    let (server, _fake) = setting.start(|_| Fault::None);
    let hybrid = format!("hybrid: '{}', ", setting.bench.path("hybrid").display());
    for storage in ["", &hybrid] {
        let recipe = setting.recipe(&[&server], storage);
        let kept = setting.bench.path("kept");
        let order = |samples: usize| (0..samples).collect();
        let dataset = Dataset::open(&recipe, &setting.spec, Some(&kept), order).unwrap();
        assert!(dataset.computes_states() && !dataset.needs_target());
        setting.assert_right(&read_all(&setting, &dataset, &recipe));
    }
    // The first epoch has written the cache, so no server is asked again.
    let recipe = setting.recipe(&[&server], &hybrid);
    let dataset =
        Dataset::open(&recipe, &setting.spec, Some(&setting.bench.path("kept")), |_| vec![]).unwrap();
    assert!(!dataset.computes_states());
    setting.assert_swept(0);
}

/// The states of all samples, one step for all of them.
fn read_all(setting: &Setting, dataset: &Dataset, recipe: &Recipe) -> Vec<SampleStates> {
    let runtime = TargetRuntime { device: Device::Cpu, dtype: Kind::Float, per_step: SAMPLES };
    let mut states = StateSource::open(dataset, &setting.spec, recipe, runtime).unwrap();
    assert!(states.target().is_none());
    let order: Vec<usize> = (0..SAMPLES).collect();
    states.begin_step(0, &order).unwrap();
    let read = order.iter().map(|_| states.next_states().unwrap());
    let copy = |states: SampleStates| SampleStates {
        taps: states.taps.copy(),
        last: Tensor::copy(&states.last),
        ..states
    };
    let read = read.map(copy).collect();
    states.finish(1).unwrap();
    read
}
