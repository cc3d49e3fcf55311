//! Writes rows and findings as a self-contained HTML page.

use std::io::{self, Write};

use super::inspection::Inspection;
use super::render::{RenderedRow, Segment, show_control_characters};

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --quiet: #8a8a8a; --line: #ddd; --learnt: #c9efc9; --wrong: #b00020 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #161616; --quiet: #7c7c7c; --line: #383838; --learnt: #1e4d2b; --wrong: #ff7b88 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1rem; margin: 2rem 0 .3rem; overflow-wrap: anywhere }
table { border-collapse: collapse; margin: .5rem 0 } td, th { border: 1px solid var(--line); padding: .2rem .6rem; text-align: left; vertical-align: top; overflow-wrap: anywhere } th { white-space: nowrap }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); padding: .6rem; margin: 0; font: 13px/1.5 ui-monospace, monospace }
.learnt { background: var(--learnt); border-radius: 2px } .special { color: var(--quiet) } .cut { color: var(--quiet); text-decoration: line-through } .wrong { color: var(--wrong) }
";

/// Writes the start of the page: legend, summary and findings.
pub fn write_page_start(out: &mut impl Write, inspection: &Inspection) -> io::Result<()> {
    write!(
        out,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>Loss masks</title><style>{STYLE}</style></head><body>\n\
         <h1>Loss masks</h1>\n<p><span class=\"learnt\">supervised text</span>, <span class=\"special\">special tokens</span>, \
         <span class=\"learnt special\">supervised special tokens</span>, <span class=\"cut\">behind the maximal length</span></p>\n<table>\n"
    )?;
    for (name, value) in inspection.summary.lines() {
        writeln!(out, "<tr><th>{}</th><td>{}</td></tr>", escape_html(name), escape_html(&value))?;
    }
    writeln!(out, "</table>")?;
    if !inspection.findings.is_empty() {
        writeln!(out, "<h2 class=\"wrong\">{} problems</h2>\n<table>", inspection.findings.len())?;
        writeln!(out, "<tr><th>line</th><th>id</th><th>problem</th></tr>")?;
    }
    for finding in &inspection.findings {
        let (file, id) = (finding.file.display().to_string(), finding.id.as_deref().unwrap_or_default());
        let (file, id, reason) = (escape_html(&file), escape_html(id), escape_html(&finding.reason));
        writeln!(out, "<tr><td>{file}:{}</td><td>{id}</td><td>{reason}</td></tr>", finding.line)?;
    }
    if !inspection.findings.is_empty() {
        writeln!(out, "</table>")?;
    }
    Ok(())
}

/// Writes a row.
pub fn write_row(out: &mut impl Write, row: &RenderedRow) -> io::Result<()> {
    writeln!(out, "<h2>{}</h2>", escape_html(&row.headline()))?;
    for problem in &row.problems {
        writeln!(out, "<p class=\"wrong\">{}</p>", escape_html(problem))?;
    }
    // A browser drops the first line end after `<pre>`, so this additional one keeps the line end
    // of the row.
    writeln!(out, "<pre>")?;
    for Segment { text, supervised, special, cut } in &row.segments {
        let classes = [(*supervised, "learnt"), (*special, "special"), (*cut, "cut")];
        let classes: Vec<&str> = classes.iter().filter(|(is, _)| *is).map(|(_, class)| *class).collect();
        match classes.as_slice() {
            [] => write!(out, "{}", escape_html(text))?,
            classes => write!(out, "<span class=\"{}\">{}</span>", classes.join(" "), escape_html(text))?,
        }
    }
    writeln!(out, "</pre>")
}

/// Ends the page.
pub fn write_page_end(out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "</body></html>")
}

fn escape_html(text: &str) -> String {
    let marks = [('&', "&amp;"), ('<', "&lt;"), ('>', "&gt;"), ('"', "&quot;"), ('\'', "&#39;")];
    marks.into_iter().fold(show_control_characters(text), |text, (mark, name)| text.replace(mark, name))
}
