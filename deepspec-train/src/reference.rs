//! Describes every key of a recipe, from the types that read it: as a JSON schema for editors, and
//! as a chapter of the book.

use std::fmt::Write as _;

use deepspec_core::command_line::Description;
use serde_json::Value;

/// The descriptions of recipes that `deepspec-train` can print.
pub const PRINTABLE_DESCRIPTIONS: [Description; 2] = [
    Description {
        name: "schema",
        about: "Write the JSON schema of recipes, with which editors complete and check them",
        hidden: false,
        text: || format!("{:#}\n", deepspec_drafters::recipe_schema()),
    },
    Description {
        name: "recipe-reference",
        about: "Write the chapter of the book on recipes",
        hidden: true,
        text: || render_page(&deepspec_drafters::recipe_schema()),
    },
];

const PAGE_INTRO: &str = "# Every key of a recipe

This page lists every key of a recipe, with its values, its default and its meaning.

`deepspec-train --config FILE.yaml` reads one YAML file; `--set KEY=VALUE` overrides a key of it, written with dots (`--set train.lr=3e-4`). A key that is
not here is refused, with its line and the nearest name. `deepspec-train schema > recipe.schema.json` writes the same for editors: with
`# yaml-language-server: $schema=recipe.schema.json` in the first line they complete and check recipes.
";

/// Renders the page: one section per group of keys, starting with the recipe itself.
fn render_page(schema: &Value) -> String {
    let mut text = String::from(PAGE_INTRO);
    render_section(schema, schema, "", &mut text);
    text
}

/// Renders the section of an object, followed by the sections of its nested objects.
fn render_section(schema: &Value, object: &Value, path: &str, text: &mut String) {
    let title = if path.is_empty() { "The recipe".to_string() } else { format!("`{path}`") };
    let _ = write!(text, "\n## {title}\n\n");
    if let Some(what) = object["description"].as_str() {
        let _ = write!(text, "{}\n\n", table_cell(what));
    }
    text.push_str("| key | value | default | meaning |\n|---|---|---|---|\n");
    let required: Vec<&str> =
        object["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut inner = vec![];
    for (key, property) in object["properties"].as_object().into_iter().flatten() {
        let place = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        let target = resolve_ref(schema, property);
        let group = target["properties"].is_object();
        let value = if group { format!("see `{place}`") } else { describe_value(schema, property) };
        let default = match &property["default"] {
            _ if group => String::new(),
            Value::Null if required.contains(&key.as_str()) => "required".into(),
            Value::Null => String::new(),
            default => format!("`{default}`"),
        };
        let mut what = table_cell(
            property["description"].as_str().or(target["description"].as_str()).unwrap_or_default(),
        );
        for choice in describe_alternatives(schema, property) {
            let _ = write!(what, " {choice}");
        }
        let _ = writeln!(text, "| `{key}` | {value} | {default} | {what} |");
        if group {
            inner.push((place, target));
        }
    }
    for (place, target) in inner {
        render_section(schema, target, &place, text);
    }
}

/// Follows a `$ref`, or returns the only non-null alternative of an `anyOf`.
fn resolve_ref<'a>(schema: &'a Value, of: &'a Value) -> &'a Value {
    if let Some(place) = of["$ref"].as_str() {
        return schema.pointer(place.trim_start_matches('#')).map_or(of, |found| resolve_ref(schema, found));
    }
    let others = || of["anyOf"].as_array().into_iter().flatten().filter(|one| one["type"] != "null");
    match (others().next(), others().count()) {
        (Some(only), 1) => resolve_ref(schema, only),
        _ => of,
    }
}

/// Returns the `oneOf` alternatives of a value.
fn alternatives<'a>(schema: &'a Value, of: &'a Value) -> Vec<&'a Value> {
    let of = resolve_ref(schema, of);
    of["oneOf"].as_array().map_or(vec![of], |all| all.iter().map(|one| resolve_ref(schema, one)).collect())
}

/// Describes how a value is written.
fn describe_value(schema: &Value, of: &Value) -> String {
    let one = |of: &Value| -> String {
        if !of["const"].is_null() {
            return format!("`{}`", of["const"].as_str().unwrap_or_default());
        }
        if let Some(names) = of["enum"].as_array() {
            let names = names.iter().filter_map(Value::as_str).map(|name| format!("`{name}`"));
            return names.collect::<Vec<_>>().join(", ");
        }
        if let Some(keys) = of["properties"].as_object() {
            let keys: Vec<&str> = keys.keys().map(String::as_str).collect();
            return format!("`{{{}: …}}`", keys.join(": …, "));
        }
        if !of["items"].is_null() {
            return format!("list of {}", describe_value(schema, &of["items"]));
        }
        let types = match &of["type"] {
            Value::Array(types) => {
                types.iter().filter_map(Value::as_str).filter(|name| *name != "null").collect()
            }
            name => name.as_str().map_or(vec![], |name| vec![name]),
        };
        types.join(" or ")
    };
    alternatives(schema, of).into_iter().map(one).collect::<Vec<_>>().join(" or ")
}

/// Returns the meaning of each alternative, if there are several.
fn describe_alternatives(schema: &Value, of: &Value) -> Vec<String> {
    let all = alternatives(schema, of);
    let explained = all.iter().filter(|_| all.len() > 1).filter_map(|one| {
        let what = table_cell(one["description"].as_str()?);
        Some(format!("{}: {what}", describe_value(schema, one)))
    });
    explained.collect()
}

/// A description as one line of a Markdown table.
fn table_cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use deepspec_drafters::load_recipe;

    use super::*;

    /// Keys of a value, in dotted form.
    fn keys(value: &Value, path: &str, found: &mut Vec<String>) {
        for (key, inner) in value.as_object().into_iter().flatten() {
            let place = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            keys(inner, &place, found);
            found.push(place);
        }
    }

    #[test]
    fn every_key_of_every_recipe_is_described() {
        let text = render_page(&deepspec_drafters::recipe_schema());
        let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
        let mut recipes = 0;
        for kind in [
            "dspark",
            "dflash",
            "eagle3",
            "domino",
            "mtp",
            "gemma4_assistant",
            "peagle",
            "xpress",
            "tiny",
            "online",
            "real",
        ] {
            for file in configs.join(kind).read_dir().unwrap() {
                let recipe = load_recipe(&file.unwrap().path(), &[]).unwrap();
                let mut found = vec![];
                keys(&serde_json::to_value(recipe).unwrap(), "", &mut found);
                for place in found {
                    let (section, key) = place.rsplit_once('.').unwrap_or(("The recipe", &place));
                    // The alternatives of these values describe their inner keys.
                    if ["data.states", "data.chat_template"].contains(&section) {
                        continue;
                    }
                    let title = if place.contains('.') {
                        format!("\n## `{section}`\n")
                    } else {
                        "\n## The recipe\n".into()
                    };
                    let (_, behind) =
                        text.split_once(&title).unwrap_or_else(|| panic!("no section of {place}"));
                    let table = behind.split("\n## ").next().unwrap();
                    assert!(table.contains(&format!("\n| `{key}` |")), "{place} in {table}");
                }
                recipes += 1;
            }
        }
        assert!(recipes > 15, "{recipes}");
    }
}
