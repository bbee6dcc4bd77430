//! Tokenizer files, small ones made here.

use std::path::Path;

use ferrotitan_data::{BuildOptions, Error, HfTokenizer, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support::{build_with, documents, files, folder, write_jsonl};

/// A byte-level BPE with a few merges, truncation to one token, padding to ten, and two special tokens.
fn tokenizer_json() -> Value {
    // GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on.
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut spare = 0x100;
    let mut vocab = serde_json::Map::new();
    for byte in 0..=255_u8 {
        let character = if printable(byte) {
            char::from(byte)
        } else {
            spare += 1;
            char::from_u32(spare - 1).unwrap()
        };
        vocab.insert(character.to_string(), json!(byte));
    }
    for (id, token) in (256..).zip(["th", "the", "Ġthe"]) {
        vocab.insert(token.to_owned(), json!(id));
    }
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 10}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "!"},
        "added_tokens": [
            {"id": 259, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
             "special": true},
            {"id": 260, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
             "special": true},
        ],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                  "merges": ["t h", "th e", "Ġ the"]},
    })
}

fn write(folder: &Path, name: &str, value: &Value) {
    std::fs::write(folder.join(name), value.to_string()).unwrap();
}

fn load(folder: &Path) -> HfTokenizer {
    HfTokenizer::from_file(folder).unwrap()
}

#[test]
fn it_encodes_without_truncation_padding_or_special_tokens() {
    let folder = folder();
    write(folder.path(), "tokenizer.json", &tokenizer_json());
    let tokenizer = load(folder.path());
    assert_eq!(tokenizer.encode("the the").unwrap(), [257, 258]);
    let long = "the cat sat on the mat";
    let tokens = tokenizer.encode(long).unwrap();
    assert!(tokens.len() > 10);
    assert_eq!(tokenizer.decode(&tokens).unwrap(), long);
    assert_eq!(tokenizer.vocab_size(), 261);
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (None, None));
    assert!(matches!(tokenizer.decode(&[261]), Err(Error::Tokenizer { .. })));
    assert_eq!(tokenizer.decode(&[259, 257, 260]).unwrap(), "the");
    // By file, too.
    assert_eq!(HfTokenizer::from_file(folder.path().join("tokenizer.json")).unwrap().identity(), tokenizer.identity());
}

#[test]
fn special_tokens_come_from_the_files_beside_it() {
    let folder = folder();
    write(folder.path(), "tokenizer.json", &tokenizer_json());
    let none = load(folder.path()).identity();
    let with = |config: Value, model: Value| {
        write(folder.path(), "tokenizer_config.json", &config);
        write(folder.path(), "config.json", &model);
        let tokenizer = HfTokenizer::from_file(folder.path())?;
        Ok::<_, Error>((tokenizer.bos(), tokenizer.eos(), tokenizer.identity()))
    };
    let ids = |config, model| with(config, model).map(|(bos, eos, _)| (bos, eos)).unwrap();
    let strings = json!({"bos_token": "<s>", "eos_token": "</s>"});
    assert_eq!(ids(strings.clone(), json!({})), (Some(259), Some(260)));
    let objects = json!({"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": {"content": "</s>"}});
    assert_eq!(ids(objects, json!({})), (Some(259), Some(260)));
    assert_eq!(ids(json!({}), json!({"bos_token_id": 259, "eos_token_id": [260, 3]})), (Some(259), Some(260)));
    // The tokenizer's own file goes first, and `null` there means none.
    assert_eq!(
        ids(json!({"bos_token": null, "eos_token": "<s>"}), json!({"bos_token_id": 5, "eos_token_id": 6})),
        (None, Some(259))
    );
    assert_eq!(ids(json!({}), json!({"bos_token_id": null})), (None, None));
    assert_ne!(with(strings, json!({})).unwrap().2, none);

    for (config, model) in [
        (json!({"bos_token": "<absent>"}), json!({})),
        (json!({"bos_token": 3}), json!({})),
        (json!({"eos_token": {"text": "</s>"}}), json!({})),
        (json!({}), json!({"eos_token_id": 261})),
        (json!({}), json!({"eos_token_id": -1})),
        (json!({}), json!({"eos_token_id": []})),
        (json!({}), json!({"eos_token_id": "</s>"})),
    ] {
        let error = with(config.clone(), model.clone()).unwrap_err();
        assert!(matches!(error, Error::Tokenizer { .. }), "{config} {model}: {error}");
    }
    std::fs::write(folder.path().join("config.json"), "{").unwrap();
    let error = HfTokenizer::from_file(folder.path()).unwrap_err().to_string();
    assert!(error.contains("config.json: EOF while parsing"), "{error}");
}

#[test]
fn corrupt_files_are_refused() {
    let folder = folder();
    assert!(matches!(HfTokenizer::from_file(folder.path()), Err(Error::NotFound { .. })));
    let said = |bytes: &[u8]| {
        std::fs::write(folder.path().join("tokenizer.json"), bytes).unwrap();
        let error = HfTokenizer::from_file(folder.path()).unwrap_err();
        assert!(matches!(error, Error::Tokenizer { .. }), "{error}");
        error.to_string()
    };
    let whole = tokenizer_json().to_string();
    for bytes in [&b""[..], b"{}", b"[]", b"not json", b"\xff\xfe", &whole.as_bytes()[..whole.len() / 2]] {
        assert!(said(bytes).starts_with(&format!("tokenizer {}/tokenizer.json: ", folder.path().display())));
    }
    let mut huge = tokenizer_json();
    huge["model"]["vocab"]["the"] = json!(4_000_000_000_u32);
    let said = said(huge.to_string().as_bytes());
    assert!(said.contains("token id 4000000000 is out of proportion to 261 tokens"), "{said}");
}

#[test]
fn a_store_frames_documents() {
    let folder = folder();
    write(folder.path(), "tokenizer.json", &tokenizer_json());
    write(folder.path(), "tokenizer_config.json", &json!({"bos_token": "<s>", "eos_token": "</s>"}));
    let tokenizer = load(folder.path());
    let texts = ["the cat".to_owned(), "a\nthe".to_owned()];
    write_jsonl(&folder.path().join("x.jsonl"), &texts);
    let source = files(&[folder.path().join("x.jsonl")]);
    let store = build_with(&source, &tokenizer, folder.path(), BuildOptions::default()).unwrap();
    let expected: Vec<Vec<u32>> =
        texts.iter().map(|text| [vec![259], tokenizer.encode(text).unwrap(), vec![260]].concat()).collect();
    assert_eq!(documents(&store), expected);
    assert_eq!(store.vocab_size(), 261);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_text_round_trips(text in "(?s).{0,60}") {
        let folder = folder();
        write(folder.path(), "tokenizer.json", &tokenizer_json());
        let tokenizer = load(folder.path());
        let tokens = tokenizer.encode(&text).unwrap();
        prop_assert!(tokens.iter().all(|token| (*token as usize) < tokenizer.vocab_size()));
        prop_assert_eq!(tokenizer.decode(&tokens).unwrap(), text);
    }

    /// A file with any part replaced loads and works, or is refused.
    #[test]
    fn damaged_files_never_panic(at in 0_usize..4000, bytes in "[ -~]{1,6}") {
        let folder = folder();
        let mut text = tokenizer_json().to_string().into_bytes();
        let at = at % (text.len() - bytes.len());
        text[at..at + bytes.len()].copy_from_slice(bytes.as_bytes());
        std::fs::write(folder.path().join("tokenizer.json"), text).unwrap();
        if let Ok(tokenizer) = HfTokenizer::from_file(folder.path()) {
            let _ = tokenizer.encode("the cat <s> sat").map(|tokens| tokenizer.decode(&tokens));
        }
    }
}
