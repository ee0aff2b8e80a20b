//! The journal against crashes, faults and damage, on the file system in memory.

mod commit;
mod crash;
mod damage;
mod deferred;
mod faults;
mod parallel;
mod real_files;
mod ring;
mod staging;
mod store;
