//! The complete config as text, each key with what it means.

use super::Config;
use super::section::{Key, Section};
use serde_json::Value;

/// The complete config as TOML with a comment above each key; a key that is not set stands in a comment.
pub fn show(config: &Config) -> String {
    let value = serde_json::to_value(config).unwrap_or_default();
    let mut out = String::new();
    for key in Config::KEYS {
        section(key, key.name, &value[key.name], &mut out);
    }
    out
}

fn section(section_key: &Key, path: &str, value: &Value, out: &mut String) {
    let (sections, values): (Vec<&Key>, Vec<&Key>) = section_key.keys.iter().partition(|key| key.is_section());
    if !values.is_empty() {
        if !out.is_empty() {
            out.push('\n');
        }
        comment(section_key, out);
        out.push_str(&format!("[{path}]\n"));
    }
    for key in values {
        comment(key, out);
        match to_toml(&value[key.name]) {
            Some(value) => out.push_str(&format!("{} = {value}\n", key.name)),
            None => out.push_str(&format!("# {} is not set\n", key.name)),
        }
    }
    for key in sections {
        section(key, &format!("{path}.{}", key.name), &value[key.name], out);
    }
}

fn comment(key: &Key, out: &mut String) {
    for line in key.doc {
        out.push_str(format!("#{line}").trim_end());
        out.push('\n');
    }
}

fn to_toml(value: &Value) -> Option<toml::Value> {
    match value {
        Value::Null => None,
        value => toml::Value::try_from(value).ok(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::{Loaded, section};

    #[test]
    fn what_is_shown_reads_as_the_same_config() {
        let mut config = Config::default();
        config.model.vocab_size = Some(256);
        config.optimizer.lr = 1.0 / 3.0;
        config.model.converters.0 = vec!["a \"quoted\" name".into()];
        config.parallelism.module_fqns_per_model_part = Some(vec![vec!["layers.0".into()], vec![]]);
        let text = show(&config);
        let loaded = Loaded::from_text("shown", &text, &[]);
        assert!(loaded.problems.is_empty(), "{:?}", loaded.problems);
        assert_eq!(loaded.config, config);
    }

    #[test]
    fn every_key_is_there_with_its_meaning() {
        let text = show(&Config::default());
        for path in section::paths() {
            let name = path.rsplit('.').next().unwrap();
            assert!(
                text.lines()
                    .any(|line| line.starts_with(&format!("{name} = ")) || line == format!("# {name} is not set"))
            );
            assert!(!section::find(&path).unwrap().doc.is_empty(), "{path} has no comment");
        }
    }
}
