//! A report document, written as Markdown or as a self-contained HTML page.

use crate::plot::Plot;

/// A part of a report.
pub enum Block {
    /// A heading of the second level.
    Heading(&'static str),
    /// Running text.
    Paragraph(String),
    /// Sentences, one below the other.
    List(Vec<String>),
    /// Rows of cells; the first column is left-aligned, and all other columns are right-aligned.
    Table(Vec<String>, Vec<Vec<String>>),
    /// A plot with its file name, without extension.
    Plot(&'static str, Plot),
}

/// A report.
pub struct Document {
    /// Title of the report.
    pub title: String,
    /// Parts of the report, in order.
    pub blocks: Vec<Block>,
}

/// Folder of the plots, in the folder of the report.
pub const PLOTS_DIR: &str = "plots";

const CSS: &str = "body{font:15px/1.5 system-ui,sans-serif;color:#222;background:#fff;max-width:62rem;margin:2rem auto;\
padding:0 1rem}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem;border-bottom:1px solid #ddd}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.8rem 0}th,td{padding:.2rem .7rem;text-align:right;\
border-bottom:1px solid #e4e4e4}th{font-weight:600;border-bottom:1px solid #666}th:first-child,td:first-child{text-align:left}\
.wide{overflow-x:auto}svg{max-width:100%;height:auto}";

impl Document {
    /// The report as Markdown, with links to the plots in [`PLOTS_DIR`].
    pub fn to_markdown(&self) -> String {
        let mut text = format!("# {}\n", escape_markdown(&self.title));
        for block in &self.blocks {
            text.push('\n');
            match block {
                Block::Heading(heading) => text.push_str(&format!("## {heading}\n")),
                Block::Paragraph(words) => text.push_str(&format!("{}\n", escape_markdown(words))),
                Block::List(items) => {
                    items.iter().for_each(|item| text.push_str(&format!("- {}\n", escape_markdown(item))));
                }
                Block::Table(header, rows) => {
                    let line = |cells: &[String]| {
                        let cells: Vec<String> = cells.iter().map(|cell| escape_markdown(cell)).collect();
                        format!("| {} |\n", cells.join(" | "))
                    };
                    let rule: Vec<&str> =
                        (0..header.len()).map(|column| if column == 0 { ":--" } else { "--:" }).collect();
                    text.push_str(&line(header));
                    text.push_str(&format!("| {} |\n", rule.join(" | ")));
                    rows.iter().for_each(|row| text.push_str(&line(row)));
                }
                Block::Plot(name, plot) => {
                    text.push_str(&format!("![{}]({PLOTS_DIR}/{name}.svg)\n", escape_markdown(plot.title)));
                }
            }
        }
        text
    }

    /// The report as HTML with embedded plots.
    pub fn to_html(&self) -> String {
        let title = escape_html(&self.title);
        let mut page = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
             <style>{CSS}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        );
        for block in &self.blocks {
            match block {
                Block::Heading(heading) => page.push_str(&format!("<h2>{}</h2>\n", escape_html(heading))),
                Block::Paragraph(words) => page.push_str(&format!("<p>{}</p>\n", escape_html(words))),
                Block::List(items) => {
                    let items: String =
                        items.iter().map(|item| format!("<li>{}</li>\n", escape_html(item))).collect();
                    page.push_str(&format!("<ul>\n{items}</ul>\n"));
                }
                Block::Table(header, rows) => {
                    let line = |cells: &[String], tag: &str| {
                        let cells: String = cells
                            .iter()
                            .map(|cell| format!("<{tag}>{}</{tag}>", escape_html(cell)))
                            .collect();
                        format!("<tr>{cells}</tr>\n")
                    };
                    let rows: String = rows.iter().map(|row| line(row, "td")).collect();
                    let header = line(header, "th");
                    page.push_str(&format!("<div class=\"wide\"><table>\n{header}{rows}</table></div>\n"));
                }
                Block::Plot(_, plot) => page.push_str(&format!("<p>{}</p>\n", plot.svg())),
            }
        }
        page + "</body>\n</html>\n"
    }
}

/// Escapes Markdown's special characters.
fn escape_markdown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '|' | '<' | '*' | '_' | '`' | '[' | ']' | '\\' => out.extend(['\\', character]),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

fn escape_html(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_user_named_is_text_in_both() {
        let cell = || "a|b<script>".to_string();
        let blocks =
            vec![Block::Paragraph(cell()), Block::Table(vec![cell(), cell()], vec![vec![cell(), cell()]])];
        let document = Document { title: cell(), blocks };
        let (markdown, html) = (document.to_markdown(), document.to_html());
        assert!(!html.contains("<script>") && html.contains("<td>a|b&lt;script&gt;</td>"));
        assert!(markdown.contains("| a\\|b\\<script> | a\\|b\\<script> |\n| :-- | --: |\n"), "{markdown}");
    }
}
