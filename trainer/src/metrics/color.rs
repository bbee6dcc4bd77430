//! When and how the console has colors.

use std::env;

/// Whether text for this stream is colored: never where `NO_COLOR` is set, always where `CLICOLOR_FORCE` is, and otherwise
/// on a terminal.
pub fn wants_color(is_terminal: bool) -> bool {
    let value = |name| env::var_os(name).filter(|value| !value.is_empty());
    value("NO_COLOR").is_none() && (is_terminal || value("CLICOLOR_FORCE").is_some_and(|value| value != "0"))
}

/// A color of the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Color {
    /// 31
    Red = 31,
    /// 32
    Green = 32,
    /// 33
    Yellow = 33,
    /// 34
    Blue = 34,
    /// 35
    Magenta = 35,
    /// 36
    Cyan = 36,
}

impl Color {
    /// The text in this color, or as it is.
    pub fn paint(self, on: bool, text: &str) -> String {
        if on { format!("\x1b[{}m{text}\x1b[39m", self as u8) } else { text.to_owned() }
    }
}
