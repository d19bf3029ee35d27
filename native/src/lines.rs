//! Parses ordinary lines: one event each, in the strict wire form.
//!
//! `shipper.codec.judge` accepts every ordinary line, and some that are not parsed here: with numbers that have a
//! fraction, escapes in names, in values with a fixed form or in ledger keys, or media of more than 20 digits.

use std::collections::HashSet;

use crate::hashing::Folding;
use crate::ledger::{Key, Sums, Tally, HOUR};
use crate::window::Window;

const NAMES: [&[u8]; 13] = [
    b"\"EventId\"",
    b"\"IP\"",
    b"\"Timestamp\"",
    b"\"BTag\"",
    b"\"ConsumerID\"",
    b"\"ConsumerCountry\"",
    b"\"ConsumerCurrencyID\"",
    b"\"Username\"",
    b"\"BrandID\"",
    b"\"CustomerCurrencyID\"",
    b"\"ConsumerStatus\"",
    b"\"AffiliateID\"",
    b"\"ConsumerState\"",
];
const NAME_MAX: usize = 24;
/// The names as words of 8 bytes, each with a mask of the relevant bits.
const NAME_WORDS: [[(u64, u64); NAME_MAX / 8]; 13] = name_words();
const ALL: u16 = (1 << NAMES.len()) - 1;
const NO_DIGIT: u8 = 16;
const HEX: [u8; 256] = digits(b"0123456789abcdef0123456789ABCDEF");
const LOWER_HEX: [u8; 256] = digits(b"0123456789abcdef");
const FIRST_DIGITS: [usize; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 14, 15, 16, 17];
const LAST_DIGITS: [usize; 16] = [19, 20, 21, 22, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35];
const MEDIA_MAX: usize = 20;

/// Limits of the events to take.
pub struct Limits<'a> {
    pub events: usize,
    /// Maximum bytes of the lines and the newlines between them.
    pub bytes: usize,
    /// Maximum bytes of one line.
    pub record_bytes: usize,
    /// The latest valid Timestamp.
    pub latest: &'a [u8],
}

/// A range of the data.
#[derive(Clone, Copy, Default)]
struct Stretch {
    start: u32,
    length: u32,
}

impl Stretch {
    fn of<'a>(self, data: &'a [u8]) -> &'a [u8] {
        &data[self.start as usize..][..self.length as usize]
    }
}

/// An ordinary line.
#[derive(Default)]
pub struct Event {
    pub key: u128,
    pub consumer_id: u64,
    brand_id: i64,
    /// The line without its newline.
    line: Stretch,
    timestamp: Stretch,
    affiliate_id: Stretch,
    media: Stretch,
}

impl Event {
    /// Return the end of the line, before its newline.
    fn end(&self) -> usize {
        (self.line.start + self.line.length) as usize
    }
}

/// The lines taken from a chunk.
#[derive(Default)]
pub struct Taken<'a> {
    data: &'a [u8],
    /// The ordinary lines.
    pub events: Vec<&'a Event>,
    /// Runs of consecutive ordinary lines: start, end and number of lines.
    pub stretches: Vec<(usize, usize, usize)>,
    /// Start and end of each line that is not ordinary, or whose EventId is not new.
    pub others: Vec<(usize, usize)>,
    pub end: usize,
}

impl Taken<'_> {
    pub fn tally(&self) -> Tally {
        let text = |place: Stretch| place.of(self.data);
        let mut sums = Sums::new(self.events.len());
        for event in &self.events {
            let key = Key {
                hour: &text(event.timestamp)[..HOUR],
                brand_id: event.brand_id,
                affiliate_id: text(event.affiliate_id),
                media: text(event.media),
            };
            sums.add(key, 0, 1);
        }
        Tally::of(&sums)
    }

    /// Return the events that repeat the ConsumerID of an earlier one: ordinal, start and end in the joined lines.
    pub fn repeats(&self) -> Vec<(usize, usize, usize)> {
        let mut seen = HashSet::with_capacity_and_hasher(self.events.len(), Folding::new());
        let (mut repeats, mut start) = (Vec::new(), 0);
        for (ordinal, event) in self.events.iter().enumerate() {
            let end = start + event.line.length as usize;
            if !seen.insert(event.consumer_id) {
                repeats.push((ordinal, start, end));
            }
            start = end + 1;
        }
        repeats
    }
}

/// Find all ordinary lines.
pub fn scan_lines(data: &[u8]) -> Vec<Event> {
    let mut events = Vec::with_capacity(data.len() / 512);
    if data.len() >= u32::MAX as usize {
        return events; // positions are u32, so leave such data to the Python package
    }
    let mut order: [usize; 13] = std::array::from_fn(|field| field);
    let mut start = 0;
    while start < data.len() {
        let mut line = Line { data, at: start };
        if let Some(event) = line.event(&mut order) {
            start = event.end() + 1;
            events.push(event);
        } else {
            start = line_end(data, start) + 1;
        }
    }
    events
}

/// Take lines from `start` on, up to the limits; ordinary lines count as such only if the window admits their EventId.
pub fn take<'a>(data: &'a [u8], all: &'a [Event], start: usize, limits: &Limits, window: &mut Window) -> Taken<'a> {
    let mut next = all.partition_point(|event| (event.line.start as usize) < start);
    let events = Vec::with_capacity(limits.events.min(all.len() - next));
    let mut taken = Taken { data, events, end: start, ..Taken::default() };
    window.warm(all[next..].iter().take(limits.events).map(|event| event.key));
    while taken.events.len() + taken.others.len() < limits.events && taken.end < data.len() {
        let at = taken.end;
        let event = all.get(next).filter(|event| event.line.start as usize == at);
        let line_end = event.map_or_else(|| line_end(data, at), |event| event.end());
        if line_end - start > limits.bytes {
            break;
        }
        next += usize::from(event.is_some());
        let fits = |event: &&Event| line_end - at <= limits.record_bytes && event.timestamp.of(data) <= limits.latest;
        if let Some(event) = event.filter(fits).filter(|event| !window.is_on() || window.admit(event.key)) {
            taken.events.push(event);
            match taken.stretches.last_mut() {
                Some((_, end, count)) if *end + 1 == at => (*end, *count) = (line_end, *count + 1),
                _ => taken.stretches.push((at, line_end, 1)),
            }
        } else {
            taken.others.push((at, line_end));
        }
        taken.end = data.len().min(line_end + 1);
    }
    taken
}

fn line_end(data: &[u8], start: usize) -> usize {
    data[start..].iter().position(|&byte| byte == b'\n').map_or(data.len(), |length| start + length)
}

/// A line and the position in it. Methods return None if the line is not ordinary.
struct Line<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> Line<'a> {
    /// Read the whole line; afterwards `at` is its end, before the newline.
    fn event(&mut self, order: &mut [usize; 13]) -> Option<Event> {
        let mut event = Event::default();
        let (start, mut seen) = (self.at, 0);
        self.skip_blanks();
        self.take(b'{')?;
        for place in 0..NAMES.len() {
            self.skip_blanks();
            let field = self.field(order, place)?;
            seen |= 1 << field;
            self.take_after_blanks(b':')?;
            self.skip_blanks();
            match field {
                0 => event.key = event_key(self.of_length()?)?,
                1 => self.ip()?,
                2 => {
                    event.timestamp = Stretch { start: self.at as u32 + 1, length: 20 };
                    is_timestamp(self.of_length()?).then_some(())?;
                }
                3 => event.media = Stretch { start: self.at as u32 + 1, length: self.b_tag()?.len() as u32 },
                4 => event.consumer_id = self.number()? as u64,
                5 => self.of_length::<2>()?.iter().all(u8::is_ascii_uppercase).then_some(())?,
                6 => self.of_length::<3>()?.iter().all(u8::is_ascii_uppercase).then_some(())?,
                7 | 10 => self.text().filter(|text| !text.is_empty()).map(drop)?,
                8 => event.brand_id = self.number()?,
                9 => self.text().map(drop)?,
                11 => {
                    let start = self.at as u32 + 1;
                    let text = self.text().filter(|text| !text.contains(&b'\\'))?;
                    event.affiliate_id = Stretch { start, length: text.len() as u32 };
                }
                _ => match self.text()? {
                    [] => (),
                    [first, second] if first.is_ascii_uppercase() && second.is_ascii_uppercase() => (),
                    _ => return None,
                },
            }
            self.take_after_blanks(if place + 1 < NAMES.len() { b',' } else { b'}' })?;
        }
        self.skip_blanks();
        if seen != ALL || self.data.get(self.at).is_some_and(|&byte| byte != b'\n') {
            return None;
        }
        event.line = Stretch { start: start as u32, length: (self.at - start) as u32 };
        Some(event)
    }

    fn skip_blanks(&mut self) {
        while let Some(b' ' | b'\t' | b'\r') = self.data.get(self.at) {
            self.at += 1;
        }
    }

    fn take_after_blanks(&mut self, byte: u8) -> Option<()> {
        self.take(byte).or_else(|| {
            self.skip_blanks();
            self.take(byte)
        })
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        (*self.data.get(self.at)? == byte).then(|| self.at += 1)
    }

    /// Read a name; try the order of the previous line first, as most lines have the same one.
    fn field(&mut self, order: &mut [usize; 13], place: usize) -> Option<usize> {
        let rest = &self.data[self.at..];
        let mut field = order[place];
        if !is_name(rest, field) {
            field = NAMES.iter().position(|name| rest.starts_with(name))?;
            order[place] = field;
        }
        self.at += NAMES[field].len();
        Some(field)
    }

    /// Read a whole number from 1 to 2**63 - 1.
    fn number(&mut self) -> Option<i64> {
        let text = self.digits(19);
        if text.is_empty() || text[0] == b'0' {
            return None;
        }
        text.iter().try_fold(0i64, |number, digit| number.checked_mul(10)?.checked_add(i64::from(digit - b'0')))
    }

    /// Read a string of `LENGTH` bytes without checking its content.
    fn of_length<const LENGTH: usize>(&mut self) -> Option<&'a [u8; LENGTH]> {
        self.take(b'"')?;
        let text = self.data[self.at..].first_chunk()?;
        self.at += LENGTH;
        self.take(b'"')?;
        Some(text)
    }

    /// Read a dotted-decimal address without leading zeros.
    fn ip(&mut self) -> Option<()> {
        self.take(b'"')?;
        for end in *b"...\"" {
            let octet = self.digits(3);
            let value = octet.iter().fold(0, |value, digit| 10 * value + u32::from(digit - b'0'));
            if octet.is_empty() || (octet[0] == b'0' && octet.len() > 1) || value > 255 {
                return None;
            }
            self.take(end)?;
        }
        Some(())
    }

    /// Read up to `MEDIA_MAX` digits, an underscore and 32 hexadecimal digits; return the first digits.
    fn b_tag(&mut self) -> Option<&'a [u8]> {
        self.take(b'"')?;
        let media = self.digits(MEDIA_MAX);
        self.take(b'_')?;
        let rest: &[u8; 32] = self.data[self.at..].first_chunk()?;
        self.at += rest.len();
        self.take(b'"')?;
        let all = rest.iter().fold(0, |all, digit| all | HEX[*digit as usize]);
        (!media.is_empty() && all < NO_DIGIT).then_some(media)
    }

    /// Read up to `most` digits.
    fn digits(&mut self, most: usize) -> &'a [u8] {
        let rest = &self.data[self.at..];
        let count = rest.iter().take(most).take_while(|byte| byte.is_ascii_digit()).count();
        self.at += count;
        &rest[..count]
    }

    /// Read a string; return it without its quotes, with escapes unchanged.
    fn text(&mut self) -> Option<&'a [u8]> {
        self.take(b'"')?;
        let start = self.at;
        let mut is_ascii = true;
        loop {
            self.at += plain_bytes(&self.data[self.at..]);
            match *self.data.get(self.at)? {
                b'"' => break,
                b'\\' => self.skip_escape()?,
                0x80.. => {
                    is_ascii = false;
                    self.at += 1;
                }
                _ => return None,
            }
        }
        let text = &self.data[start..self.at];
        self.at += 1;
        (is_ascii || std::str::from_utf8(text).is_ok()).then_some(text)
    }

    fn skip_escape(&mut self) -> Option<()> {
        match *self.data.get(self.at + 1)? {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.at += 2,
            b'u' => match self.code_unit()? {
                0xd800..=0xdbff => {
                    (0xdc00..=0xdfff).contains(&self.code_unit()?).then_some(())?;
                }
                0xdc00..=0xdfff => return None,
                _ => (),
            },
            _ => return None,
        }
        Some(())
    }

    fn code_unit(&mut self) -> Option<u16> {
        let digits = self.data.get(self.at..self.at + 6)?.strip_prefix(b"\\u")?;
        self.at += 6;
        digits.iter().try_fold(0, |unit, digit| match HEX[*digit as usize] {
            NO_DIGIT => None,
            value => Some(unit << 4 | u16::from(value)),
        })
    }
}

/// Return whether the data begins with the name of a field.
fn is_name(data: &[u8], field: usize) -> bool {
    let Some(bytes) = data.first_chunk::<NAME_MAX>() else {
        return data.starts_with(NAMES[field]);
    };
    let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")));
    words.zip(NAME_WORDS[field]).fold(0, |differs, (word, (name, mask))| differs | (word & mask) ^ name) == 0
}

const fn name_words() -> [[(u64, u64); NAME_MAX / 8]; 13] {
    let mut words = [[(0, 0); NAME_MAX / 8]; 13];
    let mut field = 0;
    while field < NAMES.len() {
        let mut at = 0;
        while at < NAMES[field].len() {
            let (name, mask) = words[field][at / 8];
            let shift = 8 * (at % 8);
            words[field][at / 8] = (name | (NAMES[field][at] as u64) << shift, mask | 0xff << shift);
            at += 1;
        }
        field += 1;
    }
    words
}

/// Return the number of leading ASCII bytes before a quote, a backslash or a control character.
fn plain_bytes(data: &[u8]) -> usize {
    const ONES: u64 = u64::MAX / 255;
    const TOPS: u64 = ONES << 7;
    let mut count = 0;
    for word in data.chunks_exact(8) {
        let word = u64::from_le_bytes(word.try_into().expect("8 bytes"));
        let (quote, backslash) = (word ^ (ONES * 0x22), word ^ (ONES * 0x5c));
        // Only the lowest of the set top bits is reliable: a borrow may set others above it.
        let other = (quote.wrapping_sub(ONES) & !quote)
            | (backslash.wrapping_sub(ONES) & !backslash)
            | (word.wrapping_sub(ONES * 0x20) & !word)
            | word;
        if other & TOPS != 0 {
            return count + (other & TOPS).trailing_zeros() as usize / 8;
        }
        count += 8;
    }
    let is_plain = |byte: &&u8| matches!(**byte, 0x20..=0x7f) && **byte != b'"' && **byte != b'\\';
    count + data[count..].iter().take_while(is_plain).count()
}

const fn digits(known: &[u8]) -> [u8; 256] {
    let mut values = [NO_DIGIT; 256];
    let mut digit = 0;
    while digit < known.len() {
        values[known[digit] as usize] = digit as u8 % 16;
        digit += 1;
    }
    values
}

/// Return the value of a UUID in canonical form, None if it is in another form.
fn event_key(text: &[u8; 36]) -> Option<u128> {
    let (mut halves, mut all) = ([0u64; 2], 0);
    for (half, places) in halves.iter_mut().zip([FIRST_DIGITS, LAST_DIGITS]) {
        for place in places {
            let value = LOWER_HEX[text[place] as usize];
            all |= value;
            *half = *half << 4 | u64::from(value);
        }
    }
    let is_good = all < NO_DIGIT && [text[8], text[13], text[18], text[23]] == *b"----";
    is_good.then(|| u128::from(halves[0]) << 64 | u128::from(halves[1]))
}

fn is_timestamp(text: &[u8; 20]) -> bool {
    let mut is_good = text[4] == b'-' && text[7] == b'-' && text[10] == b'T' && text[13] == b':' && text[16] == b':';
    is_good &= text[19] == b'Z';
    let mut number = |place: usize| {
        let (tens, ones) = (text[place].wrapping_sub(b'0'), text[place + 1].wrapping_sub(b'0'));
        is_good &= tens < 10 && ones < 10;
        u32::from(tens) * 10 + u32::from(ones)
    };
    let (year, month, day) = (number(0) * 100 + number(2), number(5), number(8));
    let (hour, minute, second) = (number(11), number(14), number(17));
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 => 28 + u32::from(is_leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => 0,
    };
    is_good && year > 0 && day > 0 && day <= days && hour < 24 && minute < 60 && second < 60
}
