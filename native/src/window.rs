//! The dedupe window, see `shipper/codec/dedupe.py`: the unsettled keys, and the most recently accepted keys.

use std::collections::HashSet;
use std::hash::BuildHasher;

use crate::hashing::Folding;

const CELLS_MIN: usize = 1 << 12;

/// Split concatenated keys of 16 bytes.
pub fn keys_in(bytes: &[u8]) -> impl Iterator<Item = u128> + '_ {
    bytes.chunks_exact(16).map(|key| u128::from_be_bytes(key.try_into().expect("16 bytes")))
}

pub struct Window {
    size: usize,
    unsettled: HashSet<u128, Folding>,
    accepted: Ring,
}

impl Window {
    pub fn new(size: usize) -> Self {
        assert!(size < u32::MAX as usize, "a window of {size} EventIds");
        Window { size, unsettled: HashSet::with_hasher(Folding::new()), accepted: Ring::new(size) }
    }

    pub fn is_on(&self) -> bool {
        self.size > 0
    }

    pub fn is_accepted(&self, key: u128) -> bool {
        self.accepted.contains(key)
    }

    pub fn is_unsettled(&self, key: u128) -> bool {
        self.unsettled.contains(&key)
    }

    /// Load the cells of keys into the CPU cache, before they are admitted one by one.
    pub fn warm(&self, keys: impl Iterator<Item = u128>) {
        self.accepted.warm(keys);
    }

    /// Add a key as unsettled if it is new.
    pub fn admit(&mut self, key: u128) -> bool {
        !self.is_accepted(key) && self.unsettled.insert(key)
    }

    /// Add keys as unsettled if all are new and unique; otherwise add none.
    pub fn admit_all(&mut self, keys: &[u128]) -> bool {
        for (index, &key) in keys.iter().enumerate() {
            if !self.admit(key) {
                keys[..index].iter().for_each(|&key| self.forget(key));
                return false;
            }
        }
        true
    }

    /// Mark keys as accepted, whether admitted or not; the oldest are evicted first.
    pub fn accept(&mut self, keys: &[u128]) {
        self.accepted.warm(keys.iter().copied());
        for &key in keys {
            if self.unsettled.remove(&key) || !self.accepted.contains(key) {
                self.accepted.push(key);
            }
        }
    }

    /// Forget an unsettled key.
    pub fn forget(&mut self, key: u128) {
        self.unsettled.remove(&key);
    }

    /// Forget a key, unsettled or accepted.
    pub fn drop_key(&mut self, key: u128) {
        self.unsettled.remove(&key);
        self.accepted.remove(key);
    }
}

/// A ring buffer of keys with a hash table; the newest key overwrites the oldest.
struct Ring {
    size: usize,
    keys: Vec<u128>,
    next: usize,
    /// A hash table with linear probing.
    cells: Vec<Cell>,
    hashing: Folding,
}

/// The index of a key in the ring plus one (0 = empty), and its hash, to avoid reading other keys.
#[derive(Clone, Copy, Default)]
struct Cell {
    place: u32,
    hash: u32,
}

impl Ring {
    fn new(size: usize) -> Self {
        Ring {
            size,
            keys: Vec::with_capacity(size),
            next: 0,
            cells: vec![Cell::default(); CELLS_MIN],
            hashing: Folding::new(),
        }
    }

    fn hash(&self, key: u128) -> u32 {
        self.hashing.hash_one(key) as u32
    }

    /// Return the index of the first cell for a hash that is empty or matches.
    fn find(&self, hash: u32, is_match: impl Fn(Cell) -> bool) -> usize {
        let mask = self.cells.len() - 1;
        let mut at = hash as usize & mask;
        while self.cells[at].place != 0 && !is_match(self.cells[at]) {
            at = (at + 1) & mask;
        }
        at
    }

    fn find_key(&self, key: u128, hash: u32) -> usize {
        self.find(hash, |cell| cell.hash == hash && self.keys[cell.place as usize - 1] == key)
    }

    /// Load the cells of keys into the CPU cache; these reads run in parallel.
    fn warm(&self, keys: impl Iterator<Item = u128>) {
        let mask = self.cells.len() - 1;
        std::hint::black_box(keys.fold(0, |seen, key| seen ^ self.cells[self.hash(key) as usize & mask].place));
    }

    fn contains(&self, key: u128) -> bool {
        self.cells[self.find_key(key, self.hash(key))].place != 0
    }

    /// Add a new key.
    fn push(&mut self, key: u128) {
        let (hash, place) = (self.hash(key), self.next as u32 + 1);
        if self.keys.len() < self.size {
            self.keys.push(key);
            self.grow();
        } else {
            let oldest = std::mem::replace(&mut self.keys[self.next], key);
            // If the oldest key was removed, this finds an empty cell, and nothing changes.
            self.clear(self.find(self.hash(oldest), |cell| cell.place == place));
        }
        let at = self.find(hash, |_| false);
        self.cells[at] = Cell { place, hash };
        self.next = (self.next + 1) % self.size;
    }

    fn remove(&mut self, key: u128) {
        self.clear(self.find_key(key, self.hash(key)));
    }

    fn grow(&mut self) {
        if 2 * self.keys.len() <= self.cells.len() {
            return;
        }
        let cells = vec![Cell::default(); 2 * self.cells.len()];
        for cell in std::mem::replace(&mut self.cells, cells).into_iter().filter(|cell| cell.place != 0) {
            let at = self.find(cell.hash, |_| false);
            self.cells[at] = cell;
        }
    }

    /// Empty a cell, and move back the following cells that would otherwise no longer be found.
    fn clear(&mut self, mut hole: usize) {
        let mask = self.cells.len() - 1;
        let mut at = (hole + 1) & mask;
        while self.cells[hole].place != 0 && self.cells[at].place != 0 {
            let distance = |from: usize| at.wrapping_sub(from) & mask;
            if distance(self.cells[at].hash as usize) >= distance(hole) {
                self.cells[hole] = self.cells[at];
                hole = at;
            }
            at = (at + 1) & mask;
        }
        self.cells[hole] = Cell::default();
    }
}
