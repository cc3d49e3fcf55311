//! What is taken of a source.

use super::assign::Quota;
use super::filter::Found;
use super::input::Input;

/// A source, what was found in it and how much of it goes where.
pub struct Drawn<'a> {
    /// The source.
    pub input: &'a Input,
    /// What the first pass found.
    pub found: &'a Found,
    /// How many of the usable rows are written.
    pub quota: Quota,
}
