//! Standard output.

use std::io::{self, Write};

/// Writes results to standard output; a reader that stops reading (`| head`) has seen enough.
///
/// # Errors
/// If it cannot be written otherwise.
pub fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}
