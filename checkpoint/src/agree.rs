//! Whether something went well on every rank.

use ferrotitan_comm::Group;

use crate::{Error, Result};

/// Every rank's text, in rank order, or an error on every rank when any has one: its own, or the words of the first that
/// has.
pub(crate) fn agree(group: &Group, told: Result<String>) -> Result<Vec<String>> {
    let message = match &told {
        Ok(text) => format!("+{text}"),
        Err(error) => format!("-{error}"),
    };
    let all = group.all_gather_bytes(message.as_bytes());
    told?;
    let mut texts = Vec::new();
    for (index, bytes) in all?.into_iter().enumerate() {
        let message = String::from_utf8_lossy(&bytes);
        let (sign, text) = message.split_at_checked(1).unwrap_or_default();
        if sign == "-" {
            return Err(Error::RankFailed { rank: group.ranks()[index], reason: text.to_owned() });
        }
        texts.push(text.to_owned());
    }
    Ok(texts)
}
