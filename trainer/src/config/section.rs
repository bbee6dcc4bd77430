//! What a section of the config knows about itself: its keys, what they mean, and which of them are sections again.
//!
//! The structs under [`sections`](super::sections) are the only list of keys. The reader takes the known keys and the
//! nearest one to a misspelt one from here, and `config show` the comments.

/// One key of the config, as its struct declares it.
#[derive(Debug)]
pub struct Key {
    /// The name in TOML.
    pub name: &'static str,
    /// The doc comment, a line each, each with the space after `///`.
    pub doc: &'static [&'static str],
    /// The keys below it where it is a section, none where it is a value.
    pub keys: &'static [Key],
}

impl Key {
    /// Whether this is a section and not a value.
    pub fn is_section(&self) -> bool {
        !self.keys.is_empty()
    }
}

/// A struct that is a section of the config.
pub trait Section: Default {
    /// Its keys, in the order of the struct.
    const KEYS: &'static [Key];
}

/// The key at a dotted path (`training.seq_len`), if there is one.
pub fn find(path: &str) -> Option<&'static Key> {
    let mut keys = <super::Config as Section>::KEYS;
    let mut found = None;
    for name in path.split('.') {
        let key = keys.iter().find(|key| key.name == name)?;
        keys = key.keys;
        found = Some(key);
    }
    found
}

/// All dotted paths of values, in the order of the structs.
pub fn paths() -> Vec<String> {
    fn walk(keys: &'static [Key], prefix: &str, out: &mut Vec<String>) {
        for key in keys {
            let path = if prefix.is_empty() { key.name.to_owned() } else { format!("{prefix}.{}", key.name) };
            if key.is_section() {
                walk(key.keys, &path, out);
            } else {
                out.push(path);
            }
        }
    }
    let mut out = Vec::new();
    walk(<super::Config as Section>::KEYS, "", &mut out);
    out
}

/// Declares a section: a struct whose fields show their default beside them. A field without a default is a section.
macro_rules! section {
    (
        $(#[doc = $about:expr])*
        pub struct $name:ident {
            $( $(#[doc = $doc:expr])* pub $field:ident : $ty:ty $(= $default:expr)? , )*
        }
    ) => {
        $(#[doc = $about])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $( $(#[doc = $doc])* pub $field: $ty, )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: $crate::config::section::section!(@default $ty $(, $default)?), )* }
            }
        }

        impl $crate::config::section::Section for $name {
            const KEYS: &'static [$crate::config::section::Key] = &[
                $( $crate::config::section::Key {
                    name: stringify!($field),
                    doc: &[$($doc),*],
                    keys: $crate::config::section::section!(@keys $ty $(, $default)?),
                }, )*
            ];
        }
    };
    (@default $ty:ty) => { <$ty as Default>::default() };
    (@default $ty:ty, $default:expr) => { $default };
    (@keys $ty:ty) => { <$ty as $crate::config::section::Section>::KEYS };
    (@keys $ty:ty, $default:expr) => { &[] };
}
pub(crate) use section;
