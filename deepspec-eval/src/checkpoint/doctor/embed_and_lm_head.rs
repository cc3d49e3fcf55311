//! Compares the drafter's embedding and LM head with the target's.

use std::collections::HashSet;

use deepspec_core::digest;
use deepspec_drafters::DrafterProbe;
use deepspec_models::TargetModel;
use tch::{Device, Kind, Tensor};

use super::finding;
use super::report::{Cause, Finding};

/// Result of comparing one matrix of the drafter with the target's, row by row.
struct RowComparison {
    name: &'static str,
    rows: usize,
    /// Rows that differ from the target's row of that token id.
    differing: usize,
    /// Differing rows that equal the target's row of another token id.
    elsewhere: usize,
}

/// Results for embedding and LM head.
pub struct EmbedAndHead(Vec<RowComparison>);

/// Compares embedding and LM head row by row, as bfloat16. The LM head of a reduced vocabulary is the drafter's own and is
/// not compared, and neither are those of a drafter without copies.
pub fn compare_embed_and_head(drafter: &dyn DrafterProbe, target: &TargetModel) -> EmbedAndHead {
    let Some((own_embed, own_head)) = drafter.embed_and_head() else { return EmbedAndHead(vec![]) };
    let (embed, head) = target.embed_and_head();
    let mut compared = vec![compare_rows("embed_tokens", &own_embed, &embed)];
    if drafter.draft_tokens().is_none() {
        compared.push(compare_rows("lm_head", &own_head, &head));
    }
    EmbedAndHead(compared)
}

fn compare_rows(name: &'static str, own: &Tensor, target: &Tensor) -> RowComparison {
    let (own, target) = (row_bytes(own), row_bytes(target));
    let pairs = own.iter().zip(&target).filter(|(own, target)| own != target);
    let differing: Vec<&Vec<u8>> = pairs.map(|(own, _)| own).collect();
    let elsewhere = if differing.is_empty() {
        0
    } else {
        let known: HashSet<u128> = target.iter().map(|row| digest::fingerprint(row)).collect();
        differing.iter().filter(|row| known.contains(&digest::fingerprint(row))).count()
    };
    RowComparison { name, rows: own.len(), differing: differing.len(), elsewhere }
}

/// The rows of `[V, d]` as bfloat16.
fn row_bytes(matrix: &Tensor) -> Vec<Vec<u8>> {
    let matrix = matrix.detach().to_kind(Kind::BFloat16).to_device(Device::Cpu).contiguous();
    let mut bytes = vec![0; matrix.numel() * 2];
    matrix.copy_data_u8(&mut bytes, matrix.numel());
    let width = matrix.size().get(1).map_or(1, |&width| width as usize * 2);
    bytes.chunks(width.max(1)).map(<[u8]>::to_vec).collect()
}

impl EmbedAndHead {
    /// Whether any row of either matrix differs from the target's.
    pub fn any_row_differs(&self) -> bool {
        self.0.iter().any(|rows| rows.differing > 0)
    }

    /// Whether most differing rows equal the target's rows of other token ids, which means another
    /// vocabulary.
    pub fn is_permuted(&self) -> bool {
        self.0.iter().any(|rows| rows.elsewhere * 2 > rows.differing && rows.differing * 100 > rows.rows)
    }

    /// Findings about the differing rows.
    pub fn findings(&self) -> Vec<Finding> {
        let differing = self.0.iter().filter(|rows| rows.differing > 0);
        differing
            .map(|&RowComparison { name, rows, differing, elsewhere }| {
                let (cause, more) = if self.is_permuted() {
                    (Cause::Vocabulary, format!("; {elsewhere} of these are the target's under another id"))
                } else {
                    (Cause::EmbedAndHead, String::new())
                };
                finding(cause, format!("{differing} of {rows} rows of {name} are not the target's{more}"))
            })
            .collect()
    }
}
