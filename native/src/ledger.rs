//! Counts events by hour, brand, affiliate and media, and sums such counts.

use std::collections::HashMap;
use std::ops::Range;

use crate::hashing::Folding;

/// The length of an hour, `YYYY-MM-DDThh`.
pub const HOUR: usize = 13;
const IDENTIFIER_MAX: usize = 64;

/// The key of a count; all texts are UTF-8.
#[derive(Clone, Copy, Hash, PartialEq, Eq)]
pub struct Key<'a> {
    pub hour: &'a [u8],
    pub brand_id: i64,
    pub affiliate_id: &'a [u8],
    pub media: &'a [u8],
}

/// The numbers of accepted events and of duplicates.
pub type Counts = [i64; 2];

/// Running sums of counts, in the order in which the keys were added.
pub struct Sums<'a> {
    places: HashMap<Key<'a>, usize, Folding>,
    rows: Vec<(Key<'a>, Counts)>,
}

impl<'a> Sums<'a> {
    /// Reserve capacity for `keys` keys.
    pub fn new(keys: usize) -> Self {
        Sums { places: HashMap::with_capacity_and_hasher(keys, Folding::new()), rows: Vec::with_capacity(keys) }
    }

    /// Add to the count at `place`: 0 = accepted, 1 = duplicates.
    pub fn add(&mut self, key: Key<'a>, place: usize, count: i64) {
        let rows = &mut self.rows;
        let row = *self.places.entry(key).or_insert_with(|| {
            rows.push((key, [0, 0]));
            rows.len() - 1
        });
        rows[row].1[place] += count;
    }
}

struct Row {
    /// Start of the hour in the text, followed by the affiliate and the media.
    start: u32,
    media_start: u32,
    end: u32,
    brand_id: i64,
    counts: Counts,
}

/// Counts by key; keys are unique, and keys without events are omitted.
pub struct Tally {
    text: Vec<u8>,
    rows: Vec<Row>,
}

impl Tally {
    pub fn of(sums: &Sums) -> Self {
        let mut tally =
            Tally { text: Vec::with_capacity(32 * sums.rows.len()), rows: Vec::with_capacity(sums.rows.len()) };
        for (key, counts) in sums.rows.iter().filter(|(_, counts)| *counts != [0, 0]) {
            let start = tally.text.len() as u32;
            tally.text.extend_from_slice(key.hour);
            tally.text.extend_from_slice(key.affiliate_id);
            let media_start = tally.text.len() as u32;
            tally.text.extend_from_slice(key.media);
            let end = tally.text.len() as u32;
            tally.rows.push(Row { start, media_start, end, brand_id: key.brand_id, counts: *counts });
        }
        tally
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn rows(&self) -> impl Iterator<Item = (Key<'_>, Counts)> {
        self.rows.iter().map(|row| {
            let text = |range: Range<usize>| &self.text[range];
            let (start, media, end) = (row.start as usize, row.media_start as usize, row.end as usize);
            let key = Key {
                hour: text(start..start + HOUR),
                brand_id: row.brand_id,
                affiliate_id: text(start + HOUR..media),
                media: text(media..end),
            };
            (key, row.counts)
        })
    }

    /// Return whether each affiliate is empty or an identifier, which is safe to store and never needs escaping.
    pub fn has_identifiers(&self) -> bool {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        self.rows()
            .all(|(key, _)| key.affiliate_id.len() <= IDENTIFIER_MAX && key.affiliate_id.iter().copied().all(is_plain))
    }

    /// Encode the six columns in MessagePack: hours, brands, affiliates, media, accepted, duplicates.
    pub fn columns(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.text.len() + 20 * self.rows.len() + 64);
        bytes.push(0x96);
        self.write_texts(&mut bytes, |key| key.hour);
        self.write_numbers(&mut bytes, |row| row.brand_id);
        self.write_texts(&mut bytes, |key| key.affiliate_id);
        self.write_texts(&mut bytes, |key| key.media);
        self.write_numbers(&mut bytes, |row| row.counts[0]);
        self.write_numbers(&mut bytes, |row| row.counts[1]);
        bytes
    }

    fn write_texts(&self, bytes: &mut Vec<u8>, text_of: impl for<'k> Fn(&Key<'k>) -> &'k [u8]) {
        self.begin_column(bytes);
        self.rows().for_each(|(key, _)| write_text(bytes, text_of(&key)));
    }

    fn write_numbers(&self, bytes: &mut Vec<u8>, number_of: impl Fn(&Row) -> i64) {
        self.begin_column(bytes);
        self.rows.iter().for_each(|row| write_number(bytes, number_of(row)));
    }

    fn begin_column(&self, bytes: &mut Vec<u8>) {
        bytes.push(0xdd);
        bytes.extend_from_slice(&(self.rows.len() as u32).to_be_bytes());
    }
}

fn write_text(bytes: &mut Vec<u8>, text: &[u8]) {
    match text.len() {
        length @ ..32 => bytes.push(0xa0 | length as u8),
        length @ ..256 => bytes.extend_from_slice(&[0xd9, length as u8]),
        length => {
            bytes.push(0xdb);
            bytes.extend_from_slice(&(length as u32).to_be_bytes());
        }
    }
    bytes.extend_from_slice(text);
}

fn write_number(bytes: &mut Vec<u8>, number: i64) {
    match number {
        0..128 => bytes.push(number as u8),
        0..65536 => {
            bytes.push(0xcd);
            bytes.extend_from_slice(&(number as u16).to_be_bytes());
        }
        _ => {
            bytes.push(0xd3);
            bytes.extend_from_slice(&number.to_be_bytes());
        }
    }
}
