//! A reader of Python pickles that runs nothing: it builds a description of the objects, and knows only the few classes
//! that PyTorch's checkpoints are made of.
//!
//! Each instruction adds at most one value, and nothing is copied but bytes of the pickle itself, so that what is
//! allocated stays proportional to what was read. Values refer to each other by index: a pickle that contains itself is
//! no endless structure, and whoever walks it goes only as deep as the classes that they look for.

use std::collections::HashMap;

use crate::interchange::flaw::Flaw;

/// The classes and functions that may be named, each by every module that has had it. All else is refused.
const KNOWN: &[(&str, &[&str])] = &[
    (
        "torch.distributed.checkpoint.metadata",
        &[
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ],
    ),
    ("torch.distributed.checkpoint.filesystem", &["_StorageInfo"]),
    ("torch.serialization", &["_get_layout"]),
    ("torch.storage", &["UntypedStorage"]),
    ("torch._utils", &["_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"]),
    (
        "torch",
        &[
            "Size",
            "bool",
            "uint8",
            "int8",
            "int16",
            "int32",
            "int64",
            "float16",
            "bfloat16",
            "float32",
            "float64",
            "float8_e4m3fn",
            "float8_e5m2",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "complex64",
            "BoolStorage",
            "ByteStorage",
            "CharStorage",
            "ShortStorage",
            "IntStorage",
            "LongStorage",
            "HalfStorage",
            "BFloat16Storage",
            "FloatStorage",
            "DoubleStorage",
            "ComplexFloatStorage",
        ],
    ),
    ("collections", &["OrderedDict"]),
    ("pathlib", &["PosixPath", "WindowsPath"]),
    ("pathlib._local", &["PosixPath", "WindowsPath"]),
];

/// The index of a value.
type Id = u32;

/// A value of a pickle. A class is named without its module: no two of [`KNOWN`] share a name.
#[derive(Debug, Clone)]
enum Value {
    None,
    Bool,
    Int(i64),
    Float,
    Str(String),
    Bytes,
    Sequence(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Global(&'static str),
    /// What a class or a function was to be called with, and what it was to be filled with.
    Object {
        class: &'static str,
        arguments: Id,
        state: Option<Id>,
    },
    /// What stands for a storage in `torch.save`.
    Persistent(Id),
}

/// All values of a pickle.
#[derive(Debug)]
pub(super) struct Pickle {
    values: Vec<Value>,
    root: Id,
}

/// A value, to look at.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node<'a> {
    pickle: &'a Pickle,
    id: Id,
}

impl Pickle {
    /// Reads a pickle of protocols 2 to 5.
    pub(super) fn parse(bytes: &[u8]) -> Result<Pickle, Flaw> {
        Machine { bytes, at: 0, values: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new() }.run()
    }

    /// The value that all others are in.
    pub(super) fn root(&self) -> Node<'_> {
        Node { pickle: self, id: self.root }
    }
}

impl<'a> Node<'a> {
    fn value(self) -> &'a Value {
        // Ids are only ever made for values that exist.
        &self.pickle.values[self.id as usize]
    }

    fn at(self, id: Id) -> Node<'a> {
        Node { pickle: self.pickle, id }
    }

    fn expected<T>(self, what: &str) -> Result<T, Flaw> {
        let found = match self.value() {
            Value::None => "None",
            Value::Bool => "a bool",
            Value::Int(_) => "an int",
            Value::Float => "a float",
            Value::Str(_) => "a str",
            Value::Bytes => "bytes",
            Value::Sequence(_) => "a list or tuple",
            Value::Dict(_) => "a dict",
            Value::Global(name) | Value::Object { class: name, .. } => name,
            Value::Persistent(_) => "a storage",
        };
        Flaw::damaged(format!("there is {found} where {what} should be"))
    }

    /// Whether it is `None`.
    pub(super) fn is_none(self) -> bool {
        matches!(self.value(), Value::None)
    }

    pub(super) fn str(self) -> Result<&'a str, Flaw> {
        match self.value() {
            Value::Str(text) => Ok(text),
            _ => self.expected("a str"),
        }
    }

    /// An int that is no negative one.
    pub(super) fn size(self) -> Result<usize, Flaw> {
        match self.value() {
            Value::Int(number) if *number >= 0 => Ok(*number as usize),
            _ => self.expected("a size"),
        }
    }

    /// The items of a list or tuple.
    pub(super) fn items(self) -> Result<impl ExactSizeIterator<Item = Node<'a>>, Flaw> {
        match self.value() {
            Value::Sequence(items) => Ok(items.iter().map(move |id| self.at(*id))),
            _ => self.expected("a list or tuple"),
        }
    }

    /// The items of a list or tuple of so many, or more, of which the first are given.
    pub(super) fn first<const N: usize>(self) -> Result<[Node<'a>; N], Flaw> {
        let items: Vec<_> = self.items()?.take(N).collect();
        items.try_into().or_else(|_| self.expected(&format!("a list or tuple of {N}")))
    }

    /// The entries of a dict.
    pub(super) fn entries(self) -> Result<impl ExactSizeIterator<Item = (Node<'a>, Node<'a>)>, Flaw> {
        match self.value() {
            Value::Dict(entries) => Ok(entries.iter().map(move |(key, value)| (self.at(*key), self.at(*value)))),
            _ => self.expected("a dict"),
        }
    }

    /// A class or function that is named and not called.
    pub(super) fn global(self) -> Result<&'static str, Flaw> {
        match self.value() {
            Value::Global(name) => Ok(name),
            _ => self.expected("the name of a type"),
        }
    }

    /// The class of an object, or the function whose result it is.
    pub(super) fn class(self) -> Result<&'static str, Flaw> {
        match self.value() {
            Value::Object { class, .. } => Ok(class),
            _ => self.expected("an object"),
        }
    }

    /// What the class or function `class` was to be called with.
    pub(super) fn call(self, class: &str) -> Result<Node<'a>, Flaw> {
        match self.value() {
            Value::Object { class: found, arguments, .. } if *found == class => Ok(self.at(*arguments)),
            _ => self.expected(class),
        }
    }

    /// What an object of `class` was to be filled with.
    pub(super) fn state(self, class: &str) -> Result<Node<'a>, Flaw> {
        match self.value() {
            Value::Object { class: found, state: Some(state), .. } if *found == class => Ok(self.at(*state)),
            _ => self.expected(&format!("a filled {class}")),
        }
    }

    /// A field of an object of `class`; `None` where it has none of that name.
    pub(super) fn field(self, class: &str, name: &str) -> Result<Option<Node<'a>>, Flaw> {
        let mut entries = self.state(class)?.entries()?;
        Ok(entries.find(|(key, _)| key.str() == Ok(name)).map(|(_, value)| value))
    }

    /// A field that an object of `class` must have.
    pub(super) fn need(self, class: &str, name: &str) -> Result<Node<'a>, Flaw> {
        match self.field(class, name)? {
            Some(value) => Ok(value),
            None => Flaw::damaged(format!("a {class} has no `{name}`")),
        }
    }

    /// What stands for a storage.
    pub(super) fn persistent(self) -> Result<Node<'a>, Flaw> {
        match self.value() {
            Value::Persistent(id) => Ok(self.at(*id)),
            _ => self.expected("a storage"),
        }
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    /// How high the stack was at each open mark.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl<'a> Machine<'a> {
    fn run(mut self) -> Result<Pickle, Flaw> {
        loop {
            let at = self.at;
            let [code] = self.take()?;
            match code {
                b'.' => {
                    let root = self.pop()?;
                    return Ok(Pickle { values: self.values, root });
                }
                _ => self.step(code).map_err(|flaw| match flaw {
                    Flaw::Damaged(reason) => Flaw::Damaged(format!("at byte {at} of the pickle: {reason}")),
                    other => other,
                })?,
            }
        }
    }

    fn step(&mut self, code: u8) -> Result<(), Flaw> {
        match code {
            // PROTO, FRAME: nothing depends on them here.
            0x80 => self.take::<1>().map(|_| ()),
            0x95 => self.take::<8>().map(|_| ()),
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool),
            0x89 => self.push(Value::Bool),
            b'J' => self.take().and_then(|number| self.push(Value::Int(i32::from_le_bytes(number).into()))),
            b'K' => self.take().and_then(|number| self.push(Value::Int(u8::from_le_bytes(number).into()))),
            b'M' => self.take().and_then(|number| self.push(Value::Int(u16::from_le_bytes(number).into()))),
            0x8a => self.long(),
            b'G' => self.take::<8>().and_then(|_| self.push(Value::Float)),
            // SHORT_BINUNICODE, BINUNICODE, BINUNICODE8.
            0x8c | b'X' | 0x8d => {
                let text = match code {
                    0x8c => self.sized::<1>()?,
                    b'X' => self.sized::<4>()?,
                    _ => self.sized::<8>()?,
                };
                match std::str::from_utf8(text) {
                    Ok(text) => self.push(Value::Str(text.to_owned())),
                    Err(_) => Flaw::damaged("a str is not UTF-8"),
                }
            }
            // SHORT_BINBYTES, BINBYTES, BINBYTES8.
            b'C' => self.sized::<1>().and_then(|_| self.push(Value::Bytes)),
            b'B' => self.sized::<4>().and_then(|_| self.push(Value::Bytes)),
            0x8e => self.sized::<8>().and_then(|_| self.push(Value::Bytes)),
            b'(' => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            b')' | b']' => self.push(Value::Sequence(Vec::new())),
            b'}' => self.push(Value::Dict(Vec::new())),
            b't' => {
                let items = self.above_mark()?;
                self.push(Value::Sequence(items))
            }
            // TUPLE1, TUPLE2, TUPLE3.
            0x85..=0x87 => {
                let count = usize::from(code - 0x84);
                let Some(start) = self.stack.len().checked_sub(count).filter(|start| *start >= self.floor()) else {
                    return Flaw::damaged("a tuple has too few items");
                };
                let items = self.stack.split_off(start);
                self.push(Value::Sequence(items))
            }
            b'a' => self.pop().and_then(|item| self.extend(vec![item])),
            b'e' => self.above_mark().and_then(|items| self.extend(items)),
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.insert(vec![key, value])
            }
            b'u' => self.above_mark().and_then(|pairs| self.insert(pairs)),
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(module, name)
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                match (&self.values[module as usize], &self.values[name as usize]) {
                    (Value::Str(module), Value::Str(name)) => {
                        let (module, name) = (module.clone(), name.clone());
                        self.global(&module, &name)
                    }
                    _ => Flaw::damaged("a class is named by something other than a str"),
                }
            }
            // REDUCE, NEWOBJ: what Python would call here is only written down.
            b'R' | 0x81 => {
                let (arguments, class) = (self.pop()?, self.pop()?);
                match self.values[class as usize] {
                    Value::Global(class) => self.push(Value::Object { class, arguments, state: None }),
                    _ => Flaw::damaged("something is called that is no class"),
                }
            }
            b'b' => {
                let state = self.pop()?;
                let object = self.top()?;
                match &mut self.values[object as usize] {
                    Value::Object { state: slot @ None, .. } => {
                        *slot = Some(state);
                        Ok(())
                    }
                    _ => Flaw::damaged("something is filled that is no new object"),
                }
            }
            b'Q' => self.pop().and_then(|id| self.push(Value::Persistent(id))),
            // MEMOIZE, BINPUT, LONG_BINPUT.
            0x94 => self.put(self.memo.len() as u32),
            b'q' => self.take().and_then(|[key]| self.put(key.into())),
            b'r' => self.take().and_then(|key| self.put(u32::from_le_bytes(key))),
            b'h' => self.take().and_then(|[key]| self.get(key.into())),
            b'j' => self.take().and_then(|key| self.get(u32::from_le_bytes(key))),
            other => Flaw::unsupported(
                format!("the pickle instruction {:?}", char::from(other)),
                "no checkpoint of PyTorch needs it, so it is not run",
            ),
        }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Flaw> {
        match self.bytes.get(self.at..).and_then(|rest| rest.first_chunk::<N>()) {
            Some(bytes) => {
                self.at += N;
                Ok(*bytes)
            }
            None => Flaw::damaged("the pickle ends too early"),
        }
    }

    /// Bytes that follow their own number, which `N` bytes give.
    fn sized<const N: usize>(&mut self) -> Result<&'a [u8], Flaw> {
        let mut length = [0; 8];
        length[..N].copy_from_slice(&self.take::<N>()?);
        let rest = &self.bytes[self.at..];
        match usize::try_from(u64::from_le_bytes(length)).ok().and_then(|length| rest.get(..length)) {
            Some(bytes) => {
                self.at += bytes.len();
                Ok(bytes)
            }
            None => Flaw::damaged("a str or bytes is longer than the pickle"),
        }
    }

    fn line(&mut self) -> Result<&'a str, Flaw> {
        let rest = &self.bytes[self.at..];
        let Some(end) = rest.iter().position(|byte| *byte == b'\n') else {
            return Flaw::damaged("the name of a class does not end");
        };
        self.at += end + 1;
        std::str::from_utf8(&rest[..end]).or_else(|_| Flaw::damaged("the name of a class is not UTF-8"))
    }

    fn long(&mut self) -> Result<(), Flaw> {
        let digits = self.sized::<1>()?;
        if digits.len() > 8 {
            return Flaw::damaged("a number has more than 64 bits");
        }
        let negative = digits.last().is_some_and(|last| *last >= 0x80);
        let mut number = [if negative { 0xff } else { 0 }; 8];
        number[..digits.len()].copy_from_slice(digits);
        self.push(Value::Int(i64::from_le_bytes(number)))
    }

    fn global(&mut self, module: &str, name: &str) -> Result<(), Flaw> {
        let names = KNOWN.iter().filter(|(known, _)| *known == module).flat_map(|(_, names)| names.iter());
        match names.copied().find(|known| *known == name) {
            Some(known) => self.push(Value::Global(known)),
            None => Flaw::unsupported(
                format!("the Python object {module}.{name}"),
                "a checkpoint may name only what PyTorch's own metadata and tensors consist of, and nothing is ever run",
            ),
        }
    }

    fn push(&mut self, value: Value) -> Result<(), Flaw> {
        let Ok(id) = u32::try_from(self.values.len()) else {
            return Flaw::damaged("there are more values than can be");
        };
        self.values.push(value);
        self.stack.push(id);
        Ok(())
    }

    /// What lies below the last open mark belongs to somebody else.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<Id, Flaw> {
        match self.stack.last() {
            Some(id) if self.stack.len() > self.floor() => Ok(*id),
            _ => Flaw::damaged("the pickle takes what it has not put down"),
        }
    }

    fn pop(&mut self) -> Result<Id, Flaw> {
        let id = self.top()?;
        self.stack.pop();
        Ok(id)
    }

    fn above_mark(&mut self) -> Result<Vec<Id>, Flaw> {
        match self.marks.pop() {
            Some(mark) => Ok(self.stack.split_off(mark)),
            None => Flaw::damaged("a list ends that did not begin"),
        }
    }

    fn extend(&mut self, items: Vec<Id>) -> Result<(), Flaw> {
        let list = self.top()?;
        match &mut self.values[list as usize] {
            Value::Sequence(list) => {
                list.extend(items);
                Ok(())
            }
            _ => Flaw::damaged("something is appended to that is no list"),
        }
    }

    fn insert(&mut self, pairs: Vec<Id>) -> Result<(), Flaw> {
        let dict = self.top()?;
        let (pairs, rest) = pairs.as_chunks::<2>();
        match &mut self.values[dict as usize] {
            Value::Dict(dict) if rest.is_empty() => {
                dict.extend(pairs.iter().map(|[key, value]| (*key, *value)));
                Ok(())
            }
            _ => Flaw::damaged("a key has no value, or something is inserted into that is no dict"),
        }
    }

    fn put(&mut self, key: u32) -> Result<(), Flaw> {
        let id = self.top()?;
        self.memo.insert(key, id);
        Ok(())
    }

    fn get(&mut self, key: u32) -> Result<(), Flaw> {
        match self.memo.get(&key) {
            Some(id) => {
                self.stack.push(*id);
                Ok(())
            }
            None => Flaw::damaged("the pickle refers to what it has not said"),
        }
    }
}
