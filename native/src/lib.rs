//! The native extension of `shipper`: parses ordinary records, and tracks the EventIds in flight and accepted.
//!
//! It is optional: without it, the Python package does the same. It always validates all other records.

#![forbid(unsafe_code)]

mod hashing;
mod ledger;
mod lines;
mod window;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use ledger::{Key, Sums, Tally, HOUR};
use lines::{scan_lines, take, Event, Limits};
use window::{keys_in, Window};

/// The version of this interface, see `shipper.system.native`; increment it with every change.
const INTERFACE: u32 = 4;

/// See `_Scanned` in `shipper.codec.codec`.
type Scanned<'py> = (
    usize,
    Vec<(usize, usize, usize)>,
    Vec<(usize, usize)>,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
    Vec<(usize, usize, usize)>,
    PyTally,
);

#[pyclass(name = "DedupeWindow")]
struct PyWindow {
    window: Window,
}

/// The same methods as `shipper.codec.dedupe.DedupeWindow`, with the same results.
#[pymethods]
impl PyWindow {
    #[new]
    fn new(size: usize) -> Self {
        PyWindow { window: Window::new(size) }
    }

    #[getter]
    fn is_on(&self) -> bool {
        self.window.is_on()
    }

    fn is_accepted(&self, key: &[u8]) -> bool {
        keys_in(key).next().is_some_and(|key| self.window.is_accepted(key))
    }

    fn is_unsettled(&self, key: &[u8]) -> bool {
        keys_in(key).next().is_some_and(|key| self.window.is_unsettled(key))
    }

    fn admit(&mut self, keys: &[u8]) -> bool {
        let keys: Vec<u128> = keys_in(keys).collect();
        self.window.admit_all(&keys)
    }

    fn accept(&mut self, keys: &[u8]) {
        let keys: Vec<u128> = keys_in(keys).collect();
        self.window.accept(&keys);
    }

    fn forget(&mut self, keys: &[u8]) {
        keys_in(keys).for_each(|key| self.window.forget(key));
    }

    fn drop(&mut self, keys: &[u8]) {
        keys_in(keys).for_each(|key| self.window.drop_key(key));
    }
}

/// The ordinary lines of a chunk.
#[pyclass(frozen)]
struct Scan {
    events: Vec<Event>,
}

#[pymethods]
impl Scan {
    /// Take lines from `start` on, up to the limits; admit the EventIds of ordinary ones if the window is on.
    ///
    /// `data` must be the scanned bytes.
    #[allow(clippy::too_many_arguments)]
    fn take<'py>(
        &self,
        py: Python<'py>,
        data: &Bound<'py, PyBytes>,
        start: usize,
        room_events: usize,
        room_bytes: usize,
        max_record_bytes: usize,
        latest: &str,
        window: &Bound<'py, PyWindow>,
    ) -> PyResult<Scanned<'py>> {
        let mut borrowed = window.borrow_mut();
        let window = &mut borrowed.window;
        let latest = latest.as_bytes();
        let limits = Limits { events: room_events, bytes: room_bytes, record_bytes: max_record_bytes, latest };
        let is_on = window.is_on();
        let taken = take(data.as_bytes(), &self.events, start, &limits, window);
        let keys = PyBytes::new_with(py, if is_on { 16 * taken.events.len() } else { 0 }, |bytes| {
            for (place, event) in bytes.chunks_exact_mut(16).zip(&taken.events) {
                place.copy_from_slice(&event.key.to_be_bytes());
            }
            Ok(())
        })?;
        let consumer_ids = PyBytes::new_with(py, 8 * taken.events.len(), |bytes| {
            for (place, event) in bytes.chunks_exact_mut(8).zip(&taken.events) {
                place.copy_from_slice(&event.consumer_id.to_ne_bytes());
            }
            Ok(())
        })?;
        let (repeats, ledger) = (taken.repeats(), PyTally { tally: taken.tally() });
        Ok((taken.end, taken.stretches, taken.others, keys, consumer_ids, repeats, ledger))
    }
}

/// Find the ordinary lines of a chunk; releases the GIL.
#[pyfunction]
fn scan(py: Python<'_>, data: &Bound<'_, PyBytes>) -> Scan {
    let data = data.as_bytes();
    Scan { events: py.detach(|| scan_lines(data)) }
}

/// Join values, each a line that begins like an object, with a newline after each; also return their cumulative lengths.
///
/// None if a value is something else, or longer than `max_bytes`.
#[pyfunction]
fn join_lines<'py>(
    py: Python<'py>,
    values: &Bound<'py, PyList>,
    max_bytes: usize,
) -> PyResult<Option<(Bound<'py, PyBytes>, Vec<usize>)>> {
    let (mut total, mut lengths) = (0, Vec::with_capacity(values.len()));
    for value in values {
        match value.cast::<PyBytes>().map(|value| value.as_bytes()) {
            Ok(line @ [b'{', ..]) if line.len() <= max_bytes && !line.contains(&b'\n') => total += line.len(),
            _ => return Ok(None),
        }
        lengths.push(total);
    }
    let data = PyBytes::new_with(py, total + lengths.len(), |mut room| {
        for value in values {
            let line = value.cast::<PyBytes>()?.as_bytes();
            let (place, rest) = room.split_at_mut(line.len() + 1);
            place[..line.len()].copy_from_slice(line);
            place[line.len()] = b'\n';
            room = rest;
        }
        Ok(())
    })?;
    Ok(Some((data, lengths)))
}

/// Counts by hour, brand, affiliate and media.
#[pyclass(frozen, name = "Tally")]
struct PyTally {
    tally: Tally,
}

#[pymethods]
impl PyTally {
    fn __len__(&self) -> usize {
        self.tally.len()
    }

    /// Return the keys with the number of accepted events.
    fn items(&self) -> Vec<((&str, i64, &str, &str), i64)> {
        let rows = self.tally.rows();
        rows.map(|(key, counts)| ((text(key.hour), key.brand_id, text(key.affiliate_id), text(key.media)), counts[0]))
            .collect()
    }

    /// Return the number of events, accepted or duplicate.
    fn total(&self) -> i64 {
        self.tally.rows().map(|(_, counts)| counts[0] + counts[1]).sum()
    }

    /// Return the first and the last hour; empty if there are none.
    fn hours(&self) -> (&str, &str) {
        let hours = || self.tally.rows().map(|(key, _)| key.hour);
        (text(hours().min().unwrap_or_default()), text(hours().max().unwrap_or_default()))
    }

    /// Encode the six columns in MessagePack: hours, brands, affiliates, media, accepted, duplicates.
    fn columns<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let bytes = py.detach(|| self.tally.columns());
        PyBytes::new(py, &bytes)
    }
}

/// Sum tallies and dicts of counts; return None if an affiliate is not an identifier, so the caller must rename it.
#[pyfunction]
fn add_up(
    py: Python<'_>,
    accepted: Vec<Bound<'_, PyAny>>,
    repeated: Vec<Bound<'_, PyAny>>,
) -> PyResult<Option<PyTally>> {
    let (mut tallies, mut others) = (Vec::new(), Vec::new());
    for (place, parts) in [accepted, repeated].into_iter().enumerate() {
        for part in parts {
            if let Ok(tally) = part.cast::<PyTally>() {
                tallies.push((place, tally.clone().unbind()));
            } else {
                for (key, count) in part.cast::<PyDict>()? {
                    match key.extract::<(String, i64, String, String)>() {
                        Ok(key) if key.0.len() == HOUR => others.push((place, key, count.extract()?)),
                        _ => return Ok(None),
                    }
                }
            }
        }
    }
    let tally = py.detach(|| {
        let mut sums = Sums::new(tallies.iter().map(|(_, part)| part.get().tally.len()).sum());
        for (place, part) in &tallies {
            part.get().tally.rows().for_each(|(key, counts)| sums.add(key, *place, counts[0]));
        }
        for (place, (hour, brand_id, affiliate_id, media), count) in &others {
            let (hour, affiliate_id, media) = (hour.as_bytes(), affiliate_id.as_bytes(), media.as_bytes());
            sums.add(Key { hour, brand_id: *brand_id, affiliate_id, media }, *place, *count);
        }
        Tally::of(&sums)
    });
    Ok(tally.has_identifiers().then_some(PyTally { tally }))
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("valid UTF-8, as checked by the scanner")
}

#[pymodule]
fn shipper_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("INTERFACE", INTERFACE)?;
    module.add_class::<PyWindow>()?;
    module.add_class::<Scan>()?;
    module.add_class::<PyTally>()?;
    module.add_function(wrap_pyfunction!(add_up, module)?)?;
    module.add_function(wrap_pyfunction!(join_lines, module)?)?;
    module.add_function(wrap_pyfunction!(scan, module)?)
}
