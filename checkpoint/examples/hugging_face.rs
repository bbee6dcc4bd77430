//! Looks into a checkpoint, and turns a Hugging Face Llama into one of Ferrotitan's and back.
//!
//! ```sh
//! hugging_face FOLDER                       # a table of what is in it, whatever its format
//! hugging_face import MODEL CHECKPOINTS     # a Hugging Face model becomes step 0
//! hugging_face export CHECKPOINTS LIKE OUT  # the latest step becomes a model, of the shape of the model LIKE
//! ```
#![allow(clippy::print_stdout)]

use std::env::args;
use std::error::Error;

use ferrotitan_checkpoint::interchange::hugging_face::{Model, Options, write};
use ferrotitan_checkpoint::interchange::{Row, convert, open};
use ferrotitan_checkpoint::{Checkpoint, Store, Which};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = args().skip(1).collect();
    let mut shown = 0;
    let mut progress = |done: u64, total: u64| {
        let percent = done * 100 / total.max(1);
        if percent >= shown + 10 {
            println!("{percent} % of {total} bytes");
            shown = percent;
        }
    };
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["import", model, checkpoints] => {
            let model = Model::open(Store::open(model)?)?;
            convert(&model, &Store::open(checkpoints)?, 0, serde_json::Value::Null, &mut progress)?;
        }
        ["export", checkpoints, like, out] => {
            let checkpoint = Checkpoint::open(&Store::open(checkpoints)?, Which::Latest)?;
            let config = Model::open(Store::open(like)?)?.config().clone();
            write(&checkpoint, &Store::open(out)?, &Options::new(config), &mut progress)?;
        }
        [folder] => {
            let opened = open(&Store::open(folder)?, Which::Latest)?;
            println!("{opened}");
            for Row { name, info, bytes, files, .. } in opened.inspect() {
                println!(
                    "{name:60} {:5} {:20} {bytes:>14} {}",
                    info.dtype,
                    format!("{:?}", info.shape),
                    files.join(" ")
                );
            }
        }
        _ => println!("hugging_face FOLDER | import MODEL CHECKPOINTS | export CHECKPOINTS LIKE OUT"),
    }
    Ok(())
}
