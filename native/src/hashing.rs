//! A hash function that is fast for short keys and cannot be predicted outside of the process.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Folds each word into the state by a multiplication with a secret.
#[derive(Clone, Copy)]
pub struct Folding {
    state: u64,
    secret: u64,
}

impl Folding {
    pub fn new() -> Self {
        let random = RandomState::new();
        Folding { state: random.hash_one(1), secret: random.hash_one(2) }
    }
}

impl BuildHasher for Folding {
    type Hasher = Folding;

    fn build_hasher(&self) -> Folding {
        *self
    }
}

impl Hasher for Folding {
    fn write(&mut self, bytes: &[u8]) {
        let mut words = bytes.chunks_exact(8);
        for word in words.by_ref() {
            self.write_u64(u64::from_le_bytes(word.try_into().expect("8 bytes")));
        }
        self.write_u64(words.remainder().iter().fold(bytes.len() as u64, |word, byte| word << 8 | u64::from(*byte)));
    }

    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.state ^ word) * u128::from(self.secret);
        self.state = product as u64 ^ (product >> 64) as u64;
    }

    fn write_usize(&mut self, _: usize) {
        // Ignore the length prefix of a slice: `write` hashes the length.
    }

    fn write_u128(&mut self, number: u128) {
        self.write_u64(number as u64);
        self.write_u64((number >> 64) as u64);
    }

    fn finish(&self) -> u64 {
        self.state
    }
}
