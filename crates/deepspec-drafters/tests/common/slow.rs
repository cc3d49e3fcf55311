//! The objective of block drafters with autograd and whole `[R, V]` tensors; the library's closed
//! form must match it.

use deepspec_drafters::{BlockBatch, DSpark, DSparkObjective, Dpace, Lk, LkForm, LossDenominator};
use tch::{Kind, Reduction, Tensor};

/// D-PACE's weights, row by row.
fn paces(dpace: Dpace, ce: &Tensor, rows: &[i64], gamma: i64) -> Tensor {
    let smooth = |ce: f64| (1.0 - dpace.smoothing) * (-ce).exp() + dpace.smoothing;
    let confidence: Vec<f64> =
        Vec::<f64>::try_from(ce.to_kind(Kind::Double)).unwrap().into_iter().map(smooth).collect();
    let block = |row: usize| rows[row] / gamma;
    let weight = |j: usize| -> f32 {
        let first = (0..=j).find(|&i| block(i) == block(j)).unwrap();
        let ends = (j..rows.len()).take_while(|&m| block(m) == block(j));
        ends.map(|m| confidence[first..=m].iter().product::<f64>()).sum::<f64>() as f32
    };
    Tensor::from_slice(&(0..rows.len()).map(weight).collect::<Vec<_>>())
}

/// The loss of block verification of each row's block, `[R]`, from log probabilities `[R, V]`, row by row.
fn block_verification(
    beta: f64,
    log_p: &Tensor,
    log_q: &Tensor,
    labels: &Tensor,
    rows: &[i64],
    gamma: i64,
) -> Tensor {
    let zero = || Tensor::zeros([], (Kind::Float, log_p.device()));
    let mut losses: Vec<Tensor> = vec![];
    for block in rows.chunk_by(|a, b| a / gamma == b / gamma) {
        let first = losses.len();
        let (mut sum, mut least, mut scores) = (zero(), zero(), vec![]);
        let in_order = block.iter().enumerate().take_while(|(place, row)| **row % gamma == *place as i64);
        for (place, _) in in_order {
            let row = (first + place) as i64;
            let (log_p, log_q) = (log_p.get(row), log_q.get(row));
            scores.push((&least + &log_p).minimum(&(&sum + &log_q)).logsumexp([0], false));
            let label = labels.get(row).int64_value(&[]);
            sum = &sum + log_q.get(label) - log_p.get(label);
            least = least.minimum(&sum);
        }
        let loss = match scores.is_empty() {
            true => zero(),
            false => {
                let scores = Tensor::stack(&scores, 0);
                match beta {
                    0.0 => -scores.mean(Kind::Float),
                    beta => -(scores * beta).exp().mean(Kind::Float).log() / beta,
                }
            }
        };
        losses.extend(block.iter().map(|_| loss.shallow_clone()));
    }
    Tensor::stack(&losses, 0)
}

/// The loss with its autograd graph, and the sums of the single losses by name.
pub fn objective(
    block: &DSpark,
    batch: &BlockBatch,
    objective: &DSparkObjective,
    normaliser: LossDenominator,
) -> (Tensor, Vec<(&'static str, f64)>) {
    let recipe = &objective.loss;
    let hidden = block.hidden_states(batch);
    let rows = |t: &Tensor| t.flatten(0, 1).index_select(0, &batch.supervised_indices);
    let features = block.teacher_forced_features(&hidden, &batch.previous);
    let (e, features) = features.map_or((None, None), |(e, f)| (Some(rows(&e)), Some(rows(&f))));
    let logits = block.teacher_forced_logits(&rows(&hidden), features.as_ref());
    let (p, log_p) = (logits.softmax(-1, Kind::Float), logits.log_softmax(-1, Kind::Float));
    let teacher = block.base_logits(&batch.teacher_states()).detach();
    let (q, log_q) = (teacher.softmax(-1, Kind::Float), teacher.log_softmax(-1, Kind::Float));
    let sum = |values: Tensor| values.sum_dim_intlist(-1, false, Kind::Float);
    let weighted = |values: &Tensor| (values * &batch.weights).sum(Kind::Float);

    let ce = -log_p.gather(1, &batch.labels.unsqueeze(1), false).squeeze_dim(1);
    let l1 = sum((&p - &q).abs());
    let (soft_ce, kl) = (-sum(&q * &log_p), sum(&q * (&log_q - &log_p)));
    let overlap = sum(p.minimum(&q));
    let lk = recipe.lk.map(|Lk { form, eta, .. }| match form {
        LkForm::LogAcceptance => -overlap.log(),
        LkForm::Hybrid => {
            let blend = (overlap.detach() * -eta).exp();
            &blend * &kl + (1.0 - &blend) * (1.0 - &overlap)
        }
    });
    let paced = recipe.dpace.map(|dpace| {
        let rows = Vec::<i64>::try_from(&batch.supervised_indices).unwrap();
        (&ce * paces(dpace, &ce.detach(), &rows, block.config().settings.blocks.draft_len() as i64))
            .sum(Kind::Float)
    });
    let until_error = recipe.until_first_error.then(|| {
        let rows = Vec::<i64>::try_from(&batch.supervised_indices).unwrap();
        let right = Vec::<bool>::try_from(logits.argmax(-1, false).eq_tensor(&batch.labels)).unwrap();
        let gamma = block.config().settings.blocks.draft_len() as i64;
        let counts = |row: usize| {
            let of_block = (0..row).filter(|&other| rows[other] / gamma == rows[row] / gamma);
            of_block.fold(1.0_f32, |so_far, other| if right[other] { so_far } else { 0.0 })
        };
        let counted = Tensor::from_slice(&(0..rows.len()).map(counts).collect::<Vec<_>>());
        (&ce * &batch.weights * counted).sum(Kind::Float)
    });
    let block_verification = recipe.block_verification.map(|bv| {
        let rows = Vec::<i64>::try_from(&batch.supervised_indices).unwrap();
        let gamma = block.config().settings.blocks.draft_len() as i64;
        let of_blocks = block_verification(bv.beta, &log_p, &log_q, &batch.labels, &rows, gamma);
        weighted(&of_blocks)
    });
    let adaptive = paced.or(until_error);
    let adaptive_ce = adaptive.as_ref().map(|adaptive| ("adaptive_ce", adaptive.detach()));
    let mut loss = adaptive.unwrap_or_else(|| weighted(&ce)) * recipe.ce_alpha
        + weighted(&l1) * recipe.l1_alpha
        + weighted(&soft_ce) * recipe.soft_ce_alpha
        + weighted(&kl) * recipe.kl_alpha;
    if let Some((lk, value)) = recipe.lk.zip(lk.as_ref()) {
        loss += weighted(value) * lk.alpha;
    }
    if let Some((bv, value)) = recipe.block_verification.zip(block_verification.as_ref()) {
        loss += value * bv.alpha;
    }
    let accept = (l1.detach() * -0.5 + 1.0).clamp(0.0, 1.0);
    let mut sums = vec![("ce", weighted(&ce)), ("l1", weighted(&l1))];
    if let Some(logits) = block.confidence_logits(&rows(&hidden), e.as_ref()) {
        let none = None::<&Tensor>;
        let bce = weighted(&logits.binary_cross_entropy_with_logits(&accept, none, none, Reduction::None));
        loss += &bce * objective.confidence_alpha;
        sums.push(("confidence", bce));
    }
    if recipe.soft_ce_alpha + recipe.kl_alpha > 0.0 {
        sums.extend([("soft_ce", weighted(&soft_ce)), ("kl", weighted(&kl))]);
    }
    sums.extend(adaptive_ce);
    sums.extend(block_verification.map(|loss| ("block_verification", loss)));
    sums.extend(lk.map(|lk| ("lk", weighted(&lk))));
    sums.push(("loss", loss.shallow_clone()));
    (
        loss / (normaliser.0 + 1e-6),
        sums.into_iter().map(|(name, sum)| (name, sum.double_value(&[]))).collect(),
    )
}
