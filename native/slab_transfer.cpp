#include "slab_transfer.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "give_way.hpp"
#include "xxh3.hpp"

namespace kvactors {
namespace {

constexpr std::size_t kPage = 4096, kTableHead = 4096;
constexpr std::size_t kChecksumAt = 88, kMark = 16;

// Bytes of a call that moves one object. Decision 19 has the rates of other sizes.
constexpr std::size_t kCallBytes = std::size_t(1) << 20;

i64 system_read(int fd, const iovec* parts, int count, i64 at) {
    const ssize_t moved = ::preadv(fd, parts, count, at);
    return moved < 0 ? -errno : moved;
}

i64 system_write(int fd, const iovec* parts, int count, i64 at) {
    const ssize_t moved = ::pwritev(fd, parts, count, at);
    return moved < 0 ? -errno : moved;
}

i64 system_inode(const char* path) {
    struct stat state;
    if (::lstat(path, &state) == 0) return i64(state.st_ino);
    return errno == ENOENT || errno == ENOTDIR ? 0 : -errno;
}

i64 system_sync(int fd) { return ::fdatasync(fd) == 0 ? 0 : -errno; }

// A slab's descriptor: the store's, or one for this run.
class Descriptor {
public:
    Descriptor(const SlabJob& job, const SlabItem& item) : fd_(item.fd), owned_(item.fd < 0) {
        if (!owned_) return;
        char name[32];
        const long long slab = item.slot / i64(job.files.slots_per_slab);
        std::snprintf(name, sizeof name, "slab-%04lld", slab);
        const int flags = job.files.flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | (job.direct ? O_DIRECT : 0);
        fd_ = ::openat(job.files.folder, name, flags);
        if (fd_ < 0) {
            fd_ = -errno;
            return;
        }
        struct stat state;
        if (::fstat(fd_, &state) == 0 && S_ISREG(state.st_mode)) return;
        ::close(fd_);
        fd_ = -EPERM;
    }
    ~Descriptor() {
        if (owned_ && fd_ >= 0) ::close(fd_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    int get() const { return fd_; }  // negative: the error number

private:
    int fd_;
    const bool owned_;
};

// Moves all of `parts` from or to `at`. Returns the bytes until the end of the file, or the error of
// a call that moved nothing at its start. `parts` is used up.
i64 move_all(i64 (*call)(int, const iovec*, int, i64), int fd, iovec* parts, int count, i64 at) {
    i64 moved = 0;
    bool cut = false;  // the last call moved less than it was asked to
    while (count > 0) {
        iovec piece{parts->iov_base, std::min(parts->iov_len, kCallBytes)};
        const i64 now = call(fd, count == 1 ? &piece : parts, count, at + moved);
        if (now == -EINTR) continue;
        // Direct I/O goes on at a block's boundary only.
        if (now < 0) return cut && now == -EINVAL ? moved : now;
        if (now == 0) break;
        cut = count > 1 || std::size_t(now) < piece.iov_len;
        moved += now;
        std::size_t rest = std::size_t(now);
        while (count > 0 && rest >= parts->iov_len) {
            rest -= parts->iov_len;
            ++parts;
            --count;
        }
        if (rest == 0) continue;
        parts->iov_base = static_cast<u8*>(parts->iov_base) + rest;
        parts->iov_len -= rest;
    }
    return moved;
}

i64 place(const SlabJob& job, u32 item) {
    return job.items[item].slot % i64(job.files.slots_per_slab) * i64(job.files.stride);
}

void all(SlabJob& job, u32 first, u32 count, i32 outcome) {
    std::fill_n(job.outcomes.begin() + first, count, outcome);
}

u64 load64(const void* at) {
    u64 value;
    std::memcpy(&value, at, 8);
    return value;
}

// One object. Returns the bytes moved, or an error.
i64 move_one(SlabJob& job, u32 i, int fd, const SlabCalls& calls, Bounce& bounce) {
    const SlabItem& item = job.items[i];
    const std::size_t size = job.files.size, stride = job.files.stride;
    const bool writes = job.work == SlabWork::kWrite;
    iovec part{item.memory, item.whole ? stride : size};
    u8* aside = nullptr;
    if (job.direct && !item.whole) {
        aside = bounce.get(stride);
        if (aside == nullptr) return -ENOMEM;
        part = {aside, stride};
        if (writes) {
            std::memcpy(aside, item.memory, size);
            std::memset(aside + size, 0, stride - size);  // no memory of the process reaches the disk
        }
    }
    const std::size_t wanted = part.iov_len;
    if (writes) {
        const i64 moved = move_all(calls.write, fd, &part, 1, place(job, i));
        return moved < 0 || std::size_t(moved) == wanted ? moved : -ENOSPC;
    }
    const i64 moved = move_all(calls.read, fd, &part, 1, place(job, i));
    if (moved < 0) return moved;
    if (aside != nullptr && std::size_t(moved) >= size) std::memcpy(item.memory, aside, size);
    return moved;
}

// Several objects by one call. Whether all of them were moved.
bool move_together(SlabJob& job, u32 first, u32 count, int fd, const SlabCalls& calls) {
    std::vector<iovec> parts(count);
    for (u32 i = 0; i < count; ++i) parts[i] = {job.items[first + i].memory, job.files.stride};
    const i64 moved =
        move_all(job.work == SlabWork::kWrite ? calls.write : calls.read, fd, parts.data(), int(count), place(job, first));
    return moved == i64(count * job.files.stride);
}

// Compares objects in memory with their entries in the table, and with the store's marks.
void verify(SlabJob& job, u32 first, u32 count, const SlabCalls& calls) {
    const std::size_t bytes = job.files.entry_bytes;
    std::string table(bytes * count, '\0');
    iovec part{table.data(), table.size()};
    const i64 found =
        move_all(calls.read, job.files.table, &part, 1, i64(kTableHead) + i64(bytes) * job.items[first].slot);
    if (found < 0) return all(job, first, count, i32(found));
    for (u32 i = 0; i < count; ++i) {
        i32& outcome = job.outcomes[first + i];
        if (outcome != kDone) continue;
        outcome = kCorrupt;
        if (found < i64(bytes * (i + 1))) continue;
        const u8* const entry = reinterpret_cast<const u8*>(table.data()) + bytes * i;
        const char* const mark = job.records.data() + kMark * (first + i);
        const bool same = std::memcmp(entry + kChecksumAt, mark, 8) == 0 && std::memcmp(entry + bytes - 8, mark + 8, 8) == 0;
        if (!same || xxh3_64(entry, bytes - 8) != load64(entry + bytes - 8)) continue;
        give_way(job.files.size);
        if (xxh3_64(job.items[first + i].memory, job.files.size) == load64(mark)) outcome = kDone;
    }
}

// Waits until the device has the payloads of a job.
i64 sync_payloads(const SlabJob& job, const SlabCalls& calls) {
    const i64 slabs = i64(job.files.slots_per_slab);
    std::vector<i64> seen;
    for (const SlabItem& item : job.items) {
        const i64 slab = item.slot / slabs;
        if (std::find(seen.begin(), seen.end(), slab) != seen.end()) continue;
        seen.push_back(slab);
        const Descriptor file(job, item);
        if (file.get() < 0) return file.get();
        const i64 failed = calls.sync(file.get());
        if (failed < 0) return failed;
    }
    return 0;
}

i64 write_entries(SlabJob& job, const SlabCalls& calls) {
    const std::size_t bytes = job.files.entry_bytes, count = job.items.size();
    if (job.work == SlabWork::kErase) job.records.assign(bytes * count, '\0');
    for (std::size_t first = 0; first < count;) {
        std::size_t end = first + 1;
        while (end < count && job.items[end].slot == job.items[end - 1].slot + 1) ++end;
        iovec part{job.records.data() + bytes * first, bytes * (end - first)};
        const i64 wanted = i64(part.iov_len);
        const i64 moved = move_all(calls.write, job.files.table, &part, 1, i64(kTableHead) + i64(bytes) * job.items[first].slot);
        if (moved < 0) return moved;
        if (moved != wanted) return -ENOSPC;
        first = end;
    }
    return 0;
}

// The error number of a step that failed, `kMissing` if another table or none is in the folder.
i32 sealed(SlabJob& job, const SlabCalls& calls) {
    const i64 inode = calls.inode(job.files.table_path.c_str());
    if (inode < 0) return i32(inode);
    if (inode != job.files.table_inode) return kMissing;
    i64 failed = job.sync ? sync_payloads(job, calls) : 0;
    if (failed == 0) failed = write_entries(job, calls);
    if (failed == 0 && job.sync) failed = calls.sync(job.files.table);
    return i32(failed);
}

}  // namespace

const SlabCalls kSystemCalls{system_read, system_write, system_inode, system_sync};

Bounce::~Bounce() { std::free(memory_); }

u8* Bounce::get(std::size_t bytes) {
    if (bytes_ < bytes) {
        std::free(memory_);
        memory_ = static_cast<u8*>(std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage));
        bytes_ = memory_ == nullptr ? 0 : bytes;
    }
    return memory_;
}

void read_run(SlabJob& job, u32 first, u32 count, const SlabCalls& calls, Bounce& bounce) {
    const i64 inode = calls.inode(job.files.table_path.c_str());
    if (inode < 0) return all(job, first, count, i32(inode));
    if (inode != job.files.table_inode) return all(job, first, count, kMissing);
    const Descriptor slab(job, job.items[first]);
    if (slab.get() < 0) return all(job, first, count, i32(slab.get()));
    if (count > 1 && move_together(job, first, count, slab.get(), calls)) {
        all(job, first, count, kDone);
    } else {
        for (u32 i = first; i < first + count; ++i) {
            const i64 moved = move_one(job, i, slab.get(), calls, bounce);
            job.outcomes[i] = moved < 0 ? i32(moved) : moved < i64(job.files.size) ? kCorrupt : kDone;
        }
    }
    const auto from = job.outcomes.begin() + first;
    if (std::find(from, from + count, kDone) != from + count) verify(job, first, count, calls);
}

void write_run(SlabJob& job, u32 first, u32 count, const SlabCalls& calls, Bounce& bounce) {
    const Descriptor slab(job, job.items[first]);
    if (slab.get() < 0) return all(job, first, count, i32(slab.get()));
    const std::size_t bytes = job.files.entry_bytes;
    for (u32 i = first; i < first + count; ++i) {
        u8* const entry = reinterpret_cast<u8*>(job.records.data()) + bytes * i;
        give_way(job.files.size);
        const u64 checksum = xxh3_64(job.items[i].memory, job.files.size);
        std::memcpy(entry + kChecksumAt, &checksum, 8);
        const u64 own = xxh3_64(entry, bytes - 8);
        std::memcpy(entry + bytes - 8, &own, 8);
    }
    if (count > 1 && move_together(job, first, count, slab.get(), calls)) return all(job, first, count, kDone);
    for (u32 i = first; i < first + count; ++i) {
        const i64 moved = move_one(job, i, slab.get(), calls, bounce);
        job.outcomes[i] = moved < 0 ? i32(moved) : kDone;
    }
}

void write_table(SlabJob& job, const SlabCalls& calls) {
    all(job, 0, u32(job.items.size()), job.work == SlabWork::kSeal ? sealed(job, calls) : i32(write_entries(job, calls)));
}

}  // namespace kvactors
