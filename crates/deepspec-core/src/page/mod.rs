//! Pages that draw their data in a browser: one HTML file that contains all data and code, and works offline.

use serde::Serialize;

const FRAME: &str = include_str!("frame.html");
const CHART: &str = include_str!("chart.js");

/// Escapes text for HTML.
pub fn escape_html(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The HTML of a page. `title` and `body` are HTML, the heading and what follows it; `script` is JavaScript that finds the page's data in `data` and draws by
/// `lineChart` of chart.js.
///
/// # Errors
/// If the data cannot be written as JSON.
pub fn render_page(
    title: &str,
    body: &str,
    script: &str,
    data: &impl Serialize,
) -> Result<String, serde_json::Error> {
    // A text of the data that looks like a tag must not end the script.
    let json = serde_json::to_string(data)?.replace('<', "\\u003c");
    let parts = [("title", title), ("body", body), ("chart", CHART), ("script", script), ("data", &json)];
    let mut page = String::with_capacity(FRAME.len() + CHART.len() + json.len());
    let mut rest = FRAME;
    while let Some((before, after)) = rest.split_once("{{") {
        page.push_str(before);
        let (name, after) = after.split_once("}}").unwrap_or((after, ""));
        let part = parts.iter().find(|(known, _)| *known == name);
        page.push_str(part.map_or("", |(_, text)| text));
        rest = after;
    }
    page.push_str(rest);
    Ok(page)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn data_cannot_end_its_script_and_every_part_is_there() {
        let page = render_page("A page", "<p>Body</p>", "draw(data);", &json!({"name": "</script>{{body}}"}))
            .expect("JSON");
        assert_eq!(page.matches("</script>").count(), 2);
        assert!(page.contains("<h1>A page</h1>\n<p>Body</p>") && page.contains("draw(data);"));
        assert!(page.contains(r#"{"name":"\u003c/script>{{body}}"}"#) && page.contains("function lineChart"));
    }
}
