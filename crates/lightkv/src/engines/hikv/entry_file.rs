//! Writing and reading files of entries.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lightkv_vfs::{OpenMode, Vfs, VfsFile};

use super::entry_file_layout::{
    BLOCK_HEADER_LEN, HEADER_LEN, Header, Kind, VERSION, block_len, is_block_sound, push_entry,
    seal_block, take_entry,
};
use crate::error::io;
use crate::{Error, Result};

/// A block ends with the entry that makes it longer than this.
const BLOCK_BYTES: usize = 256 << 10;

/// A file that is being written.
pub(crate) struct EntryFileWriter {
    file: Arc<dyn VfsFile>,
    path: PathBuf,
    header: Header,
    block: Vec<u8>,
    previous: Vec<u8>,
    blocks: u64,
    offset: u64,
}

impl EntryFileWriter {
    /// Begins a file; what was there is lost.
    pub(crate) fn create(vfs: &dyn Vfs, path: &Path, header: Header) -> Result<Self> {
        let file = vfs
            .open(path, OpenMode::CreateTruncate)
            .map_err(|error| io(path, "create", error))?;
        Ok(Self {
            file,
            path: path.to_path_buf(),
            header: Header { count: 0, ..header },
            block: vec![0; BLOCK_HEADER_LEN],
            previous: Vec::new(),
            blocks: 0,
            offset: HEADER_LEN as u64,
        })
    }

    /// Adds an entry with a larger key than the one before.
    pub(crate) fn push(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        push_entry(&self.previous, key, value, &mut self.block);
        self.previous.clear();
        self.previous.extend_from_slice(key);
        self.header.count += 1;
        if self.block.len() > BLOCK_BYTES {
            self.write_block()?;
        }
        Ok(())
    }

    fn write_block(&mut self) -> Result<()> {
        seal_block(self.header.identity, self.blocks, &mut self.block);
        self.write(&self.block, self.offset)?;
        self.offset += self.block.len() as u64;
        self.blocks += 1;
        self.block.truncate(BLOCK_HEADER_LEN);
        self.previous.clear();
        Ok(())
    }

    fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.file
            .write_all_at(bytes, offset)
            .map_err(|error| io(&self.path, "write", error))
    }

    /// Makes the file whole and durable; its name may still be lost. Returns how many entries it has.
    pub(crate) fn finish(mut self) -> Result<u64> {
        if self.block.len() > BLOCK_HEADER_LEN {
            self.write_block()?;
        }
        self.write(&self.header.encode(), 0)?;
        self.file
            .sync_data()
            .map_err(|error| io(&self.path, "sync", error))?;
        Ok(self.header.count)
    }
}

/// A file that is being read, checked block by block.
pub(crate) struct EntryFileReader {
    file: Arc<dyn VfsFile>,
    path: PathBuf,
    pub(crate) header: Header,
    /// Where its blocks end.
    end: u64,
    /// Where the next block begins, and its number.
    offset: u64,
    blocks: u64,
    block: Vec<u8>,
    /// Where in the block the next entry is.
    at: usize,
    /// Entries so far, the key of the last one, and that of the one before.
    count: u64,
    key: Vec<u8>,
    previous: Vec<u8>,
}

impl EntryFileReader {
    /// Opens a file of a kind.
    ///
    /// # Errors
    /// [`Error::Corruption`], [`Error::NewerVersion`], [`Error::Foreign`] for a file of another store, [`Error::Io`].
    pub(crate) fn open(vfs: &dyn Vfs, path: &Path, kind: Kind, identity: u64) -> Result<Self> {
        let read = |error| io(path, "read", error);
        let file = vfs.open(path, OpenMode::Read).map_err(read)?;
        let len = file.len_bytes().map_err(read)?;
        let damaged = |offset, message: &str| Error::Corruption {
            file: path.to_path_buf(),
            offset,
            message: message.into(),
        };
        if len < HEADER_LEN as u64 {
            return Err(damaged(len, "the file ends within its header"));
        }
        let mut bytes = [0; HEADER_LEN];
        file.read_exact_at(&mut bytes, 0).map_err(read)?;
        let header = Header::decode(&bytes).map_err(|refused| match refused.newer {
            Some(found) => Error::NewerVersion {
                file: path.to_path_buf(),
                found,
                supported: VERSION,
            },
            None => damaged(refused.offset, refused.message),
        })?;
        if header.kind != kind || header.identity != identity {
            return Err(Error::Foreign {
                path: path.to_path_buf(),
                message: "it is of another store or for another use".into(),
            });
        }
        Ok(Self {
            file,
            path: path.to_path_buf(),
            header,
            end: len,
            offset: HEADER_LEN as u64,
            blocks: 0,
            block: Vec::new(),
            at: 0,
            count: 0,
            key: Vec::new(),
            previous: Vec::new(),
        })
    }

    /// Readers of so many shares of the file, or fewer, in order. That the shares follow each other and have all
    /// entries together is for the caller to see.
    ///
    /// # Errors
    /// [`Error::Corruption`] if the file does not end with a block; what is in the blocks is not looked at.
    pub(crate) fn split(mut self, shares: usize) -> Result<Vec<Self>> {
        let share_bytes = (self.end - self.offset).div_ceil(shares.max(1) as u64);
        let mut readers = Vec::new();
        while self.offset < self.end {
            let (begin, number) = (self.offset, self.blocks);
            while self.offset < self.end && self.offset - begin < share_bytes {
                let (_, len) = self.block_header()?;
                self.offset += (BLOCK_HEADER_LEN + len) as u64;
                self.blocks += 1;
            }
            readers.push(Self {
                file: self.file.clone(),
                path: self.path.clone(),
                header: self.header,
                end: self.offset,
                offset: begin,
                blocks: number,
                block: Vec::new(),
                at: 0,
                count: 0,
                key: Vec::new(),
                previous: Vec::new(),
            });
        }
        Ok(readers)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Entries that were read so far.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    fn damaged(&self, message: &str) -> Error {
        Error::Corruption {
            file: self.path.clone(),
            offset: self.offset,
            message: message.into(),
        }
    }

    /// The header of the next block, and the length of its entries in bytes.
    fn block_header(&self) -> Result<([u8; BLOCK_HEADER_LEN], usize)> {
        let left = self.end - self.offset;
        let mut header = [0; BLOCK_HEADER_LEN];
        if left < header.len() as u64 {
            return Err(self.damaged("the file ends within a block"));
        }
        self.read_at(&mut header, self.offset)?;
        let len = block_len(&header);
        if len == 0 || len as u64 > left - header.len() as u64 {
            return Err(self.damaged("the file ends within a block"));
        }
        Ok((header, len))
    }

    fn read_at(&self, target: &mut [u8], offset: u64) -> Result<()> {
        self.file
            .read_exact_at(target, offset)
            .map_err(|error| io(&self.path, "read", error))
    }

    /// Reads the next block; false at the end.
    fn next_block(&mut self) -> Result<bool> {
        if self.offset == self.end {
            return Ok(false);
        }
        let (header, len) = self.block_header()?;
        let mut block = std::mem::take(&mut self.block);
        block.resize(len, 0);
        self.read_at(&mut block, self.offset + header.len() as u64)?;
        self.block = block;
        if !is_block_sound(self.header.identity, self.blocks, &header, &self.block) {
            return Err(self.damaged("the checksum of a block is wrong"));
        }
        self.offset += (header.len() + len) as u64;
        self.blocks += 1;
        Ok(true)
    }

    /// The next entry; `None` at the end, if there were as many as the header says.
    ///
    /// # Errors
    /// [`Error::Corruption`] if a block is damaged, keys are out of order, or their number is another one.
    pub(crate) fn next(&mut self) -> Result<Option<(&[u8], &[u8])>> {
        let is_at_end = self.at == self.block.len() && self.offset == self.end;
        if is_at_end && self.count != self.header.count {
            return Err(self.damaged("entries are missing"));
        }
        self.next_of_share()
    }

    /// The next entry; `None` at the end of the share that this reader has.
    ///
    /// # Errors
    /// [`Error::Corruption`] if a block is damaged or keys are out of order.
    pub(crate) fn next_of_share(&mut self) -> Result<Option<(&[u8], &[u8])>> {
        if self.at == self.block.len() {
            if !self.next_block()? {
                return Ok(None);
            }
            self.at = 0;
            // Keys are cut short against those of their own block only.
            std::mem::swap(&mut self.key, &mut self.previous);
            self.key.clear();
        } else {
            self.previous.clear();
            self.previous.extend_from_slice(&self.key);
        }
        let mut rest = &self.block[self.at..];
        let Some(value) = take_entry(&mut rest, &mut self.key) else {
            return Err(self.damaged("an entry before here is malformed"));
        };
        let value_at = self.block.len() - rest.len() - value.len();
        self.at = self.block.len() - rest.len();
        if self.count > 0 && self.previous >= self.key {
            return Err(self.damaged("keys before here are out of order"));
        }
        self.count += 1;
        Ok(Some((&self.key, &self.block[value_at..self.at])))
    }
}
