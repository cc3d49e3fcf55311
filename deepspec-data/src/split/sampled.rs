//! A source with the rows to draw from it.

use super::assign::Quota;
use super::filter::SourceFindings;
use super::input::Input;

/// A source, the result of the first pass over it, and its quota.
pub struct SampledSource<'a> {
    /// The source.
    pub input: &'a Input,
    /// The result of the first pass.
    pub found: &'a SourceFindings,
    /// Number of rows to write on each side.
    pub quota: Quota,
}
