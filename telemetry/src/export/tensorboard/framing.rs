//! The framing of TensorFlow's record files: length, checksum of the length, data, checksum of the data.

/// Appends one record.
pub(super) fn append(out: &mut Vec<u8>, data: &[u8]) {
    let length = (data.len() as u64).to_le_bytes();
    out.extend_from_slice(&length);
    out.extend_from_slice(&checksum(&length).to_le_bytes());
    out.extend_from_slice(data);
    out.extend_from_slice(&checksum(data).to_le_bytes());
}

/// CRC-32C, rotated and moved: a checksum of data that holds checksums is a poor one.
fn checksum(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The records of a whole file.
#[cfg(test)]
pub(super) fn records(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut records = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<8>() {
        let (length_checksum, rest) = rest.split_first_chunk::<4>().expect("a checksum");
        assert_eq!(checksum(length), u32::from_le_bytes(*length_checksum));
        let (data, rest) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let (data_checksum, rest) = rest.split_first_chunk::<4>().expect("a checksum");
        assert_eq!(checksum(data), u32::from_le_bytes(*data_checksum));
        records.push(data);
        bytes = rest;
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The record that TensorFlow's own writer makes of an empty string, which is fixed by the format.
    #[test]
    fn an_empty_record() {
        let mut out = Vec::new();
        append(&mut out, b"");
        assert_eq!(out.len(), 16);
        assert_eq!(out[..8], [0; 8]);
        // CRC-32C of eight zero bytes is 0x8c28b28a, that of nothing is 0.
        assert_eq!(out[8..12], 0x8c28_b28a_u32.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes());
        assert_eq!(out[12..], 0xa282_ead8_u32.to_le_bytes());
    }
}
