//! Damage is found and named. It is never read as data and never causes a panic.

#[path = "common_cache/mod.rs"]
mod common;

use std::fs;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use arrow_array::{
    Array, ArrayRef, Int32Array, Int64Array, ListArray, RecordBatch, StructArray, UInt32Array,
};
use arrow_cast::cast;
use arrow_schema::{DataType, Field, Schema};
use common::*;
use deepspec_capture::cache::{CacheError, Encoding, FinalStates, Layout, Plan, Reader, verify};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use proptest::prelude::*;
use serde_json::{Value, json};

/// The files of a cache with five samples in three shards, with their bytes.
fn small(dir: &Path) -> &'static [(String, Vec<u8>)] {
    static FILES: LazyLock<Vec<(String, Vec<u8>)>> = LazyLock::new(|| {
        let dir = tempfile::tempdir().unwrap();
        let plan = plan(5, FinalStates::Supervised, 400);
        assert_eq!(plan.shards().len(), 3);
        build(dir.path(), &plan, &identity()).unwrap();
        files(dir.path())
    });
    for (name, bytes) in FILES.iter() {
        fs::write(dir.join(name), bytes).unwrap();
    }
    &FILES
}

/// Copies every sample into a caller's own buffers.
fn read_all_into(dir: &Path) -> Result<(), CacheError> {
    let reader = Reader::open(dir)?;
    for index in 0..reader.len() {
        let [mut taps, mut last] = reader.state_bytes(index)?.map(|bytes| vec![0; bytes]);
        reader.read_into(index, &mut taps, &mut last)?;
    }
    Ok(())
}

#[test]
fn every_flipped_byte_is_found_and_none_is_read() {
    for encoding in Encoding::ALL {
        let dir = tempfile::tempdir().unwrap();
        let plan =
            Plan::new(samples(5), Layout { encoding, ..layout(FinalStates::Supervised) }, 400).unwrap();
        assert!(plan.shards().len() > 1);
        build(dir.path(), &plan, &identity()).unwrap();
        for (name, bytes) in files(dir.path()) {
            let path = dir.path().join(&name);
            // Manifest and table differ little between encodings.
            let step = if encoding == Encoding::Bf16 || name.starts_with("shard") { 1 } else { 11 };
            for at in (0..bytes.len()).step_by(step) {
                let mut flipped = bytes.clone();
                flipped[at] ^= 1 << (at % 8);
                fs::write(&path, &flipped).unwrap();
                assert!(verify_complains(dir.path()), "{encoding}: {name}, byte {at}: verify is silent");
                assert!(read_all(dir.path()).is_err(), "{encoding}: {name}, byte {at} was read");
                assert!(read_all_into(dir.path()).is_err(), "{encoding}: {name}, byte {at} was copied");
            }
            fs::write(&path, bytes).unwrap();
        }
        read_all(dir.path()).unwrap();
        read_all_into(dir.path()).unwrap();
    }
}

#[test]
fn every_truncation_is_refused_at_open() {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in small(dir.path()) {
        let path = dir.path().join(name);
        let step = if name.starts_with("shard") { 1 } else { 37 };
        for length in (0..bytes.len()).step_by(step) {
            fs::write(&path, &bytes[..length]).unwrap();
            let text = message(Reader::open(dir.path()));
            assert!(text.contains(name.as_str()), "{name} cut at {length}: {text}");
            assert!(verify_complains(dir.path()));
        }
        fs::write(&path, [&bytes[..], b"\n"].concat()).unwrap();
        assert!(message(Reader::open(dir.path())).contains(name.as_str()), "{name} with a byte more");
        fs::remove_file(&path).unwrap();
        assert!(message(Reader::open(dir.path())).contains(name.as_str()), "{name} removed");
        fs::write(&path, bytes).unwrap();
    }
}

#[test]
fn messages_name_shard_sample_and_both_values() {
    let dir = tempfile::tempdir().unwrap();
    let files = small(dir.path());
    let (name, bytes) = files.iter().find(|(name, _)| name == "shard-00001.safetensors").unwrap();
    let path = dir.path().join(name);
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let expected = format!("shard-00001.safetensors: {} bytes instead of {}:", bytes.len() - 1, bytes.len());
    assert!(message(Reader::open(dir.path())).contains(&expected));

    let mut flipped = bytes.clone();
    let at = flipped.len() - 1;
    flipped[at] ^= 1;
    fs::write(&path, &flipped).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    let complaints: Vec<String> =
        (0..5).filter_map(|index| reader.sample(index).err()).map(|error| error.to_string()).collect();
    assert_eq!(complaints.len(), 1, "the other samples are whole: {complaints:?}");
    assert!(
        complaints[0].contains("shard-00001.safetensors: sample \"row-")
            && complaints[0].contains(" instead of ")
    );
    let problems = verify(dir.path(), |_| ()).unwrap();
    let named: Vec<_> =
        problems.iter().map(|problem| (problem.file.as_str(), problem.sample.is_some())).collect();
    assert_eq!(named, [("shard-00001.safetensors", false), ("shard-00001.safetensors", true)]);

    // A valid shard of another cache, of the same size.
    fs::write(&path, bytes).unwrap();
    fs::write(&path, String::from_utf8_lossy(bytes).replace("BF16", "FP16").as_bytes()).unwrap();
    assert!(Reader::open(dir.path()).is_err());

    assert!(message(Reader::open(Path::new("/nowhere"))).contains("/nowhere is no finished cache"));
    let other = json!({"format": "deepspec-cache", "version": 2, "news": []});
    fs::write(dir.path().join("manifest.json"), other.to_string()).unwrap();
    assert!(message(Reader::open(dir.path())).contains("format \"deepspec-cache\" version 2, expected"));
}

#[test]
fn nan_in_a_cache_that_is_otherwise_consistent_is_found_by_verify() {
    // The writer refuses NaN, so the test recomputes the whole chain of checksums around one.
    let dir = tempfile::tempdir().unwrap();
    small(dir.path());
    let path = dir.path().join("shard-00000.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let start = bytes.windows(8).position(|w| w == &taps_of(&samples(1)[0])[..8]).unwrap();
    bytes[start + 2..start + 4].copy_from_slice(&0x7FC0_u16.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let found = match Reader::open(dir.path()).unwrap().sample(0) {
        Err(CacheError::Checksum { found, .. }) => found,
        other => panic!("{other:?}"),
    };
    edit_table(dir.path(), 8, |column| {
        let mut values = column.as_any().downcast_ref::<UInt32Array>().unwrap().values().to_vec();
        values[0] = found;
        Arc::new(UInt32Array::from(values))
    });
    let mut manifest = manifest_json(dir.path());
    manifest["shards"][0]["sha256"] = deepspec_core::digest::sha256_of_file(&path).unwrap().into();
    reseal_table(dir.path(), manifest);
    let problems = verify(dir.path(), |_| ()).unwrap();
    let text: Vec<String> = problems.iter().map(ToString::to_string).collect();
    assert_eq!(problems.len(), 1, "{text:?}");
    assert!(text[0].contains("row 0 of tap embedding has the value NaN"), "{text:?}");
    assert_eq!(
        deepspec_capture::cache::inspect(&Reader::open(dir.path()).unwrap().sample(0).unwrap())
            .unwrap()
            .tensors[0]
            .non_finite,
        1
    );
}

/// Every leaf of the manifest is replaced by every value below, with correct digests.
#[test]
fn a_lying_manifest_is_an_error_not_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    small(dir.path());
    let honest = manifest_json(dir.path());
    let lies = [
        json!(0),
        json!(1),
        json!(-1),
        json!(u64::MAX),
        json!(i64::MAX),
        json!(1e300),
        json!(""),
        json!("../x"),
        json!(null),
        json!([]),
        json!({}),
    ];
    let mut leaves = Vec::new();
    collect_leaves(&honest, String::new(), &mut leaves);
    assert!(leaves.len() > 40);
    // Fields that nothing in the folder can contradict; `Reader::check_identity` and the digests guard
    // them.
    let free = [
        "/tool",
        "/identity/model_type",
        "/identity/target",
        "/identity/tok",
        "/identity/temp",
        "/identity/chat",
        "/identity/sys",
    ];
    let free = |leaf: &str| {
        free.iter().any(|prefix| leaf.starts_with(prefix))
            || ["/shard_bytes", "/input", "/identity/max_length", "/identity/vocab_size"].contains(&leaf)
    };
    for leaf in leaves {
        for lie in &lies {
            let mut manifest = honest.clone();
            let slot = manifest.pointer_mut(&leaf).unwrap();
            if slot == lie || leaf == "/digest" {
                continue;
            }
            *slot = lie.clone();
            reseal(dir.path(), manifest);
            let seen = read_all(dir.path()).is_err();
            let verified = verify_complains(dir.path());
            let exempt = free(&leaf) || leaf == "/identity/taps/1" || leaf == "/identity/taps/0";
            assert!(verified || exempt, "{leaf} = {lie}: verify is silent");
            assert!(seen || exempt || leaf.ends_with("/sha256"), "{leaf} = {lie}: reading is silent");
        }
    }
}

#[test]
fn samples_outside_the_identity_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    small(dir.path());
    let honest = manifest_json(dir.path());
    for (field, lie, expected) in [
        ("/identity/vocab_size", json!(18), "row 1: input_ids is 18, expected an id below 18"),
        ("/identity/max_length", json!(9), "row 1: length is 10, expected at most max_length 9"),
        ("/last", json!("all"), "last row"),
    ] {
        let mut manifest = honest.clone();
        *manifest.pointer_mut(field).unwrap() = lie;
        reseal(dir.path(), manifest);
        let text = message(Reader::open(dir.path()));
        assert!(text.contains(expected), "{text}");
    }
}

fn collect_leaves(value: &Value, at: String, leaves: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            map.iter().for_each(|(key, value)| collect_leaves(value, format!("{at}/{key}"), leaves))
        }
        Value::Array(items) => items
            .iter()
            .enumerate()
            .for_each(|(key, value)| collect_leaves(value, format!("{at}/{key}"), leaves)),
        _ => leaves.push(at),
    }
}

#[test]
fn a_lying_table_is_an_error_not_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    let files = small(dir.path());
    let honest = &files.iter().find(|(name, _)| name == "samples.parquet").unwrap().1;
    let check = |what: &str| {
        reseal_table(dir.path(), manifest_json(dir.path()));
        let text = message(Reader::open(dir.path()));
        assert!(text.contains("samples.parquet: "), "{what}: {text}");
        assert!(verify_complains(dir.path()));
        fs::write(dir.path().join("samples.parquet"), honest).unwrap();
    };
    // Numbers: extreme values in each row of each scalar column.
    for column in 1..6 {
        for row in 0..5 {
            for lie in [-1, 0, 1, 7, i64::from(i32::MAX), i64::from(i32::MIN), i64::MAX, i64::MIN] {
                let mut changed = false;
                edit_table(dir.path(), column, |array| {
                    let numbers = cast(array, &DataType::Int64).unwrap();
                    let mut values = numbers.as_any().downcast_ref::<Int64Array>().unwrap().values().to_vec();
                    let lie = match array.data_type() {
                        DataType::Int32 => lie.clamp(i32::MIN.into(), i32::MAX.into()),
                        DataType::UInt32 => lie.clamp(0, u32::MAX.into()),
                        _ => lie,
                    };
                    changed = values[row] != lie;
                    values[row] = lie;
                    cast(&Int64Array::from(values), array.data_type()).unwrap()
                });
                if changed {
                    check(&format!("column {column} row {row} = {lie}"));
                }
            }
        }
    }
    // Fewer token ids; spans with a bound that is negative, swapped or far off.
    edit_table(dir.path(), 6, |array| {
        let list = array.as_any().downcast_ref::<ListArray>().unwrap();
        let DataType::List(field) = list.data_type() else { unreachable!() };
        let lengths = [0; 5];
        let none = Int32Array::from(Vec::<i32>::new());
        Arc::new(ListArray::new(
            field.clone(),
            arrow_buffer::OffsetBuffer::from_lengths(lengths),
            Arc::new(none),
            None,
        ))
    });
    check("no token ids");
    for lie in [-1, i32::MIN, i32::MAX, 0] {
        for bound in 0..2 {
            edit_table(dir.path(), 7, |array| {
                let list = array.as_any().downcast_ref::<ListArray>().unwrap();
                let DataType::List(field) = list.data_type() else { unreachable!() };
                let pairs = list.values().as_any().downcast_ref::<StructArray>().unwrap();
                let mut bounds: Vec<ArrayRef> = pairs.columns().to_vec();
                bounds[bound] = Arc::new(Int32Array::from(vec![lie; pairs.len()]));
                let pairs = StructArray::new(pairs.fields().clone(), bounds, None);
                Arc::new(ListArray::new(field.clone(), list.offsets().clone(), Arc::new(pairs), None))
            });
            check(&format!("span bound {bound} = {lie}"));
        }
    }
    // Other tables: without a column, with a renamed, retyped or nullable one, without a row, and
    // no table at all.
    let batch = read_table(dir.path());
    let without: Vec<usize> = (0..8).collect();
    write_table(dir.path(), &batch.project(&without).unwrap());
    check("no checksum");
    for (index, field) in batch.schema().fields().iter().enumerate() {
        let other_type = if index == 0 { DataType::LargeUtf8 } else { DataType::Int16 };
        let renamed = field.as_ref().clone().with_name("x");
        let nullable = field.as_ref().clone().with_nullable(true);
        let fields = |field: Field| {
            let mut fields: Vec<Field> =
                batch.schema().fields().iter().map(|field| field.as_ref().clone()).collect();
            fields[index] = field;
            Arc::new(Schema::new(fields))
        };
        for field in [renamed, nullable] {
            write_table(dir.path(), &RecordBatch::try_new(fields(field), batch.columns().to_vec()).unwrap());
            check(&format!("field {index}"));
        }
        if !matches!(field.data_type(), DataType::List(_)) {
            let mut columns = batch.columns().to_vec();
            columns[index] = cast(&columns[index], &other_type).unwrap();
            let field = Field::new(field.name(), other_type, columns[index].null_count() > 0);
            write_table(dir.path(), &RecordBatch::try_new(fields(field), columns).unwrap());
            check(&format!("type of {index}"));
        }
    }
    write_table(dir.path(), &batch.slice(0, 4));
    check("a row less");
    write_table(dir.path(), &batch.slice(0, 0));
    check("no rows");
    fs::write(dir.path().join("samples.parquet"), "PAR1 this is none PAR1").unwrap();
    check("no parquet");
    fs::write(dir.path().join("samples.parquet"), "").unwrap();
    check("nothing");
    reseal_table(dir.path(), manifest_json(dir.path()));
    read_all(dir.path()).unwrap();
}

fn read_table(dir: &Path) -> RecordBatch {
    let file = fs::File::open(dir.join("samples.parquet")).unwrap();
    ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap().next().unwrap().unwrap()
}

fn write_table(dir: &Path, batch: &RecordBatch) {
    let file = fs::File::create(dir.join("samples.parquet")).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
}

fn edit_table(dir: &Path, column: usize, edit: impl FnOnce(&dyn Array) -> ArrayRef) {
    let batch = read_table(dir);
    let mut columns = batch.columns().to_vec();
    columns[column] = edit(&*columns[column]);
    write_table(dir, &RecordBatch::try_new(batch.schema(), columns).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// Both readers report any splice of any file, and neither panics.
    #[test]
    fn any_damage_is_an_error(pick in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), cut in 0usize..80, put in prop::collection::vec(any::<u8>(), 0..80)) {
        let dir = tempfile::tempdir().unwrap();
        let files = small(dir.path());
        let (name, bytes) = pick.get(files);
        let start = at.index(bytes.len());
        let end = (start + cut).min(bytes.len());
        let damaged = [&bytes[..start], &put, &bytes[end..]].concat();
        prop_assume!(damaged != *bytes);
        fs::write(dir.path().join(name), damaged).unwrap();
        prop_assert!(read_all(dir.path()).is_err());
        prop_assert!(verify_complains(dir.path()));
    }
}
