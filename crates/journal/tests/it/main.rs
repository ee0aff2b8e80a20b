//! The journal against crashes, faults and damage, on the file system in memory.

mod commit;
mod crash;
mod damage;
mod faults;
mod ring;
mod store;
