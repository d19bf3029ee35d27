//! The dedupe window, see `shipper/codec/dedupe.py`: exact, in slots of a ring, found through a table of chains.

use std::collections::HashSet;
use std::hash::BuildHasher;

use crate::hashing::Folding;

/// Most keys that are admitted at a time.
pub const ADMITTED_MAX: usize = 1 << 14;

const CELLS_MIN: usize = 1 << 12;
const VOID: u8 = 0;
const UNSETTLED: u8 = 1;
const ACCEPTED: u8 = 2;

/// The keys that stand one behind the other, 16 bytes each.
pub fn keys_in(bytes: &[u8]) -> impl Iterator<Item = u128> + '_ {
    bytes.chunks_exact(16).map(|key| u128::from_be_bytes(key.try_into().expect("16 bytes")))
}

/// Knows the keys that are unsettled, and those that were accepted of the last `size` that were admitted.
///
/// Slots are counted from 1 on. The cell of a key has the lowest bits of the youngest slot with a key of that cell, and
/// `before` leads to the older ones. What such bits lead to by accident is another key, which does no harm.
pub struct Window {
    size: usize,
    cells: Vec<u32>,
    keys: Vec<u128>,
    states: Vec<u8>,
    before: Vec<u32>,
    oldest: u64,
    next: u64,
    stuck: HashSet<u128>,
    hashing: Folding,
}

impl Window {
    pub fn new(size: usize) -> Self {
        let capacity = if size > 0 { size + 3 * ADMITTED_MAX } else { 0 };
        assert!(capacity < u32::MAX as usize, "a window of {size} EventIds");
        Window {
            size,
            cells: vec![0; if size > 0 { CELLS_MIN } else { 0 }],
            keys: vec![0; capacity],
            states: vec![VOID; capacity],
            before: vec![0; capacity],
            oldest: 1,
            next: 1,
            stuck: HashSet::new(),
            hashing: Folding::new(),
        }
    }

    pub fn is_on(&self) -> bool {
        self.size > 0
    }

    pub fn is_accepted(&self, key: u128) -> bool {
        self.state(key) == ACCEPTED
    }

    pub fn is_unsettled(&self, key: u128) -> bool {
        self.state(key) == UNSETTLED
    }

    fn state(&self, key: u128) -> u8 {
        if !self.stuck.is_empty() && self.stuck.contains(&key) {
            return UNSETTLED;
        }
        self.find(key).map_or(VOID, |place| self.states[place])
    }

    fn cell(&self, key: u128) -> usize {
        self.hashing.hash_one(key) as usize & (self.cells.len() - 1)
    }

    fn place(&self, slot: u64) -> usize {
        (slot % self.states.len() as u64) as usize
    }

    /// The youngest slot of a cell, if it is not overwritten.
    fn head(&self, cell: usize) -> Option<u64> {
        let distance = (self.next as u32).wrapping_sub(self.cells[cell]);
        self.next.checked_sub(u64::from(distance)).filter(|slot| (self.oldest..self.next).contains(slot))
    }

    /// The place of a key that is unsettled or accepted.
    fn find(&self, key: u128) -> Option<usize> {
        if !self.is_on() {
            return None;
        }
        let mut slot = self.head(self.cell(key))?;
        loop {
            let place = self.place(slot);
            if self.keys[place] == key && self.states[place] != VOID {
                return Some(place);
            }
            let step = u64::from(self.before[place]);
            slot = slot.checked_sub(step).filter(|older| step > 0 && *older >= self.oldest)?;
        }
    }

    /// Take keys as unsettled if each is new and stands once; otherwise none, and return the index of the first other.
    pub fn admit(&mut self, keys: &[u128]) -> Result<u64, usize> {
        let first = self.room(keys.len());
        if !self.stuck.is_empty() {
            if let Some(index) = keys.iter().position(|key| self.stuck.contains(key)) {
                return Err(index);
            }
        }
        self.warm(keys);
        self.next = first + keys.len() as u64;
        for (index, &key) in keys.iter().enumerate() {
            if self.find(key).is_some() {
                self.undo(first, &keys[..index]);
                return Err(index);
            }
            self.insert(first + index as u64, key, UNSETTLED);
        }
        Ok(first)
    }

    /// Have the processor fetch what will be looked at, of all keys side by side.
    fn warm(&self, keys: &[u128]) {
        let heads: Vec<Option<u64>> = keys.iter().map(|&key| self.head(self.cell(key))).collect();
        let places = heads.iter().flatten().map(|&slot| self.place(slot));
        std::hint::black_box(places.fold(0, |seen, place| seen ^ self.keys[place] as u32 ^ self.before[place]));
    }

    /// Take keys as accepted, as many as there are; the last ones are remembered longest.
    pub fn remember(&mut self, keys: &[u128]) {
        for some in keys.chunks(ADMITTED_MAX) {
            let first = self.room(some.len());
            self.next = first + some.len() as u64;
            for (slot, &key) in (first..).zip(some) {
                self.insert(slot, key, ACCEPTED);
            }
        }
    }

    fn insert(&mut self, slot: u64, key: u128, state: u8) {
        let (cell, place) = (self.cell(key), self.place(slot));
        self.before[place] = self.head(cell).map_or(0, |older| (slot - older) as u32);
        self.cells[cell] = slot as u32;
        self.keys[place] = key;
        self.states[place] = state;
    }

    /// Undo what was done for keys in slots from `first` on, and give all slots from there on out again.
    fn undo(&mut self, first: u64, keys: &[u128]) {
        for (index, &key) in keys.iter().enumerate().rev() {
            let slot = first + index as u64;
            let (cell, place) = (self.cell(key), self.place(slot));
            let step = self.before[place];
            self.cells[cell] = if step > 0 { (slot as u32).wrapping_sub(step) } else { 0 };
            self.states[place] = VOID;
        }
        self.next = first;
    }

    /// Have more cells than slots that are in use: no more than that, as any of their pages will be written.
    fn spread(&mut self, count: usize) {
        let used = (self.next - self.oldest) as usize + count;
        if 3 * used / 2 <= self.cells.len() {
            return;
        }
        self.cells = vec![0; (2 * used).next_power_of_two()];
        let end = std::mem::replace(&mut self.next, self.oldest);
        while self.next < end {
            let (slot, place) = (self.next, self.place(self.next));
            self.next += 1;
            if self.states[place] != VOID {
                self.insert(slot, self.keys[place], self.states[place]);
            }
        }
    }

    /// The first of some slots that lie together in the ring; what is there is forgotten.
    fn room(&mut self, count: usize) -> u64 {
        assert!(0 < count && count <= ADMITTED_MAX);
        self.spread(count);
        let capacity = self.states.len();
        let mut place = self.place(self.next);
        if place + count > capacity {
            self.forget_places(place, capacity);
            self.next += (capacity - place) as u64;
            place = 0;
        }
        self.forget_places(place, place + count);
        self.oldest = self.oldest.max((self.next + count as u64).saturating_sub(capacity as u64));
        self.next
    }

    /// Forget what is in some places of the ring; what is unsettled there is known on.
    fn forget_places(&mut self, start: usize, end: usize) {
        for place in start..end {
            if self.states[place] == UNSETTLED {
                self.stuck.insert(self.keys[place]);
            }
        }
        self.states[start..end].fill(VOID);
    }

    /// Remember keys as accepted that were admitted together, by their places behind the first one's slot.
    ///
    /// False: their slots are overwritten, and each is to be accepted by itself.
    pub fn accept(&mut self, slot: u64, ordinals: impl Iterator<Item = usize>) -> bool {
        if slot < self.oldest {
            return false;
        }
        let place = self.place(slot);
        for ordinal in ordinals {
            self.states[place + ordinal] = ACCEPTED;
        }
        true
    }

    /// Remember a key as accepted, wherever it is; also one that was not admitted.
    pub fn accept_one(&mut self, key: u128) {
        if let Some(place) = self.find(key) {
            self.states[place] = ACCEPTED;
        } else {
            self.stuck.remove(&key);
            self.remember(&[key]);
        }
    }

    /// Forget keys that were admitted together; no room is lost for what was admitted last.
    pub fn take_back(&mut self, slot: u64, keys: &[u128]) {
        if slot + keys.len() as u64 == self.next {
            self.undo(slot, keys);
        } else {
            keys.iter().for_each(|&key| self.forget(key));
        }
    }

    /// Forget a key that is unsettled, so that it is new when it comes again.
    pub fn forget(&mut self, key: u128) {
        self.stuck.remove(&key);
        if let Some(place) = self.find(key) {
            if self.states[place] == UNSETTLED {
                self.states[place] = VOID;
            }
        }
    }

    /// Forget a key, whether it is unsettled or accepted.
    pub fn drop_key(&mut self, key: u128) {
        self.stuck.remove(&key);
        // What was remembered may stand more than once.
        while let Some(place) = self.find(key) {
            self.states[place] = VOID;
        }
    }
}
