//! Compares schedule, learning rate, optimiser and clipping with the reference.

use std::collections::BTreeMap;

use deepspec_testkit::golden::{Array, Case, Values};
use deepspec_train::dist::ProcessGroup;
use deepspec_train::lr::LrSchedule;
use deepspec_train::optimizer::{AdamW, grad_norm_and_divisor};
use deepspec_train::schedule::{SampleOrder, Schedule, ScheduleInputs, SizeError};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

/// The device of parameters and gradients: `DEEPSPEC_TEST_DEVICE`, else the CPU.
fn device() -> Device {
    let name = std::env::var("DEEPSPEC_TEST_DEVICE").unwrap_or_else(|_| "cpu".into());
    deepspec_ops::parse_device(&name).unwrap_or_else(|error| panic!("{error}"))
}

fn tensor(array: &Array) -> Tensor {
    match &array.values {
        Values::Float(values) => Tensor::from_slice(values),
        Values::Double(values) => Tensor::from_slice(values),
        Values::Int(values) => Tensor::from_slice(values),
    }
    .view(array.shape.as_slice())
}

fn sizes(input: &Value) -> ScheduleInputs {
    let size = |key: &str| input[key].as_u64().unwrap() as usize;
    ScheduleInputs {
        world_size: size("world_size"),
        dataset_size: size("dataset_size"),
        local_batch_size: size("local_batch_size"),
        global_batch_size: size("global_batch_size"),
        num_train_epochs: size("num_train_epochs"),
        max_train_steps: input["max_train_steps"].as_u64().map(|n| n as usize),
    }
}

fn case_json(name: &str) -> Value {
    let path = deepspec_testkit::golden::dir(name).join("case.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn golden_schedule() {
    let json = case_json("schedule");
    for case in json["cases"].as_array().unwrap() {
        let found = Schedule::new(sizes(&case["input"])).unwrap();
        let expected = |key: &str| case["expected"][key].as_u64().unwrap() as usize;
        assert_eq!(found.gradient_accumulation_steps, expected("gradient_accumulation_steps"));
        assert_eq!(found.samples_per_epoch, expected("samples_per_epoch"));
        assert_eq!(found.per_rank_samples_per_epoch, expected("per_rank_samples_per_epoch"));
        assert_eq!(found.micro_batches_per_epoch, expected("micro_batches_per_epoch"));
        assert_eq!(found.steps_per_epoch, expected("steps_per_epoch"));
        assert_eq!(found.max_train_steps, expected("max_train_steps"));
        assert_eq!(found.num_train_epochs, expected("num_train_epochs"));
    }
    for case in json["rejected"].as_array().unwrap() {
        let error = Schedule::new(sizes(&case["input"])).unwrap_err();
        let indivisible = case["error"].as_str().unwrap().contains("divisible");
        assert_eq!(matches!(error, SizeError::Indivisible { .. }), indivisible, "{error}");
    }
}

#[test]
fn golden_schedule_sampler() {
    let json = case_json("schedule");
    for case in json["sampler"]["cases"].as_array().unwrap() {
        let number = |key: &str| case[key].as_u64().unwrap() as usize;
        let list = |value: &Value| {
            value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect::<Vec<_>>()
        };
        let permutations: Vec<Vec<usize>> =
            case["epoch_permutations"].as_array().unwrap().iter().map(list).collect();
        let replicas = number("num_replicas");
        let mut order = SampleOrder::new(number("total_size"), |epoch| permutations[epoch].clone());
        for (rank, expected) in case["expected_indices_by_rank"].as_array().unwrap().iter().enumerate() {
            let start = number("start_offset_per_rank");
            let found: Vec<usize> = (start..start + number("num_samples_per_rank"))
                .map(|i| order.sample_at(i * replicas + rank).sample)
                .collect();
            assert_eq!(found, list(expected));
        }
    }
}

#[test]
fn golden_optimizer_lr() {
    fn sequences(value: &Value, found: &mut Vec<Value>) {
        match value {
            Value::Object(map) if map.contains_key("lr_sequence_torch_le_2_7") => found.push(value.clone()),
            Value::Object(map) => map.values().for_each(|v| sequences(v, found)),
            Value::Array(list) => list.iter().for_each(|v| sequences(v, found)),
            _ => {}
        }
    }
    let json = case_json("optimizer");
    let mut found = vec![];
    sequences(&json, &mut found);
    assert!(!found.is_empty(), "the case has no sequence of torch <= 2.7");
    for case in found {
        let number = |keys: &[&str]| {
            keys.iter()
                .find_map(|key| case[key].as_f64().or_else(|| json["hyper_parameters"][key].as_f64()))
                .unwrap()
        };
        let total = number(&["total_steps", "total"]) as usize;
        let (lr, ratio) = (number(&["lr", "base_lr"]), number(&["warmup_ratio"]));
        let schedule = LrSchedule::new(lr, ratio, total);
        for (step, expected) in
            case["lr_sequence_torch_le_2_7"].as_array().unwrap().iter().enumerate().take(total)
        {
            let error = (schedule.lr_at(step) - expected.as_f64().unwrap()).abs();
            assert!(error < 1e-9, "step {step} of {total}, warm-up {ratio}: off by {error:e}");
        }
    }
}

#[test]
fn golden_optimizer_adamw() {
    let case = Case::load("optimizer");
    let names: Vec<&str> =
        case.hyper("parameter_order").as_array().unwrap().iter().map(|n| n.as_str().unwrap()).collect();
    let recorded: Vec<i64> =
        case.hyper("recorded_steps").as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect();
    let lr = case.expected("lr").f64s();
    // Parameters and gradients are bfloat16.
    let input = |name: &str| tensor(case.input(name)).to_device(device()).to_kind(Kind::BFloat16);
    for (variant, decay) in case.hyper("weight_decay").as_object().unwrap() {
        let parameters: Vec<(String, Tensor)> =
            names.iter().map(|name| (name.to_string(), input(&format!("init.{name}")))).collect();
        let alone = ProcessGroup::single_process();
        let mut optimizer = AdamW::new(&parameters, decay.as_f64().unwrap(), f64::INFINITY);
        for step in 1..=case.hyper("total_steps").as_i64().unwrap() {
            for (name, parameter) in &parameters {
                let gradient = input(&format!("grads.{name}")).get(step - 1);
                (parameter * gradient).sum(Kind::BFloat16).backward();
            }
            let _ = optimizer.step(lr[step as usize - 1], &alone).unwrap();
            if !recorded.contains(&step) {
                continue;
            }
            let state = optimizer.state(&alone).unwrap().into_iter();
            let state: BTreeMap<String, Tensor> =
                state.map(|(name, tensor)| (name, tensor.to_device(Device::Cpu))).collect();
            for (name, parameter) in &parameters {
                let expected =
                    |part: &str| tensor(case.expected(&format!("{variant}.step{step}.{part}.{name}")));
                for part in ["master", "exp_avg", "exp_avg_sq"] {
                    let error =
                        (&state[&format!("{part}.{name}")] - expected(part)).abs().max().double_value(&[]);
                    assert!(error < 1e-6, "{variant} step {step} {part} of {name}: off by {error:e}");
                }
                // Master weights that differ by 1e-7 may round to neighbouring bfloat16 values.
                let rounded = expected("master").to_kind(Kind::BFloat16).to_kind(Kind::Float);
                assert!(rounded.equal(&expected("param")));
                let found = parameter.to_device(Device::Cpu).to_kind(Kind::Float);
                let error = (found - expected("param")).abs();
                let allowed = expected("param").abs() * 2f64.powi(-8) + 1e-9;
                assert!(
                    error.le_tensor(&allowed).all().int64_value(&[]) == 1,
                    "{variant} step {step}: weights of {name}"
                );
            }
        }
    }
}

#[test]
fn golden_optimizer_clipping() {
    let case = Case::load("optimizer");
    let names: Vec<&str> =
        case.hyper("parameter_order").as_array().unwrap().iter().map(|n| n.as_str().unwrap()).collect();
    for i in 0..4 {
        let facts = case.scalar(&format!("clip{i}"));
        let bf16 = facts["dtype"] == "bfloat16";
        let gradients: Vec<Tensor> = names
            .iter()
            .map(|name| {
                let kind = if bf16 { Kind::BFloat16 } else { Kind::Float };
                tensor(case.input(&format!("clip{i}.grad.{name}"))).to_device(device()).to_kind(kind)
            })
            .collect();
        let (norm, divisor) = grad_norm_and_divisor(&gradients, facts["max_norm"].as_f64().unwrap());
        let (norm, coefficient) = (norm.double_value(&[]), 1.0 / divisor.double_value(&[]));
        let relative = |found: f64, key: &str| (found / facts[key].as_f64().unwrap() - 1.0).abs();
        assert!(relative(norm, "float64_norm") < 1e-6, "clip{i}: norm {norm}");
        assert!(relative(coefficient, "coefficient_float64") < 1e-6, "clip{i}: coefficient {coefficient}");
        if !bf16 {
            for (name, gradient) in names.iter().zip(&gradients) {
                let expected = tensor(case.expected(&format!("clip{i}.clipped.{name}")));
                let error = ((gradient * coefficient).to_device(Device::Cpu) - expected).abs().max();
                assert!(error.double_value(&[]) < 1e-6);
            }
        }
    }
}
