// A stand-in for libcuda.so.1 on plain memory, for tests: streams are queues with a thread each, kernels are those of
// block_copy.cu played on the CPU, and every address is checked against what is allocated. What the tests turn is exported
// as fake_*; see __init__.py.
#define KVACTORS_EMULATED
#include "block_copy.cu"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

typedef unsigned long long u64;
typedef int Result;
enum : Result { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
                INVALID_PTX = 218, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
                CONTEXT_IS_DESTROYED = 709, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, MISALIGNED_ADDRESS = 716,
                NOT_SUPPORTED = 801 };

const std::map<Result, const char*> kNames{
    {0, "CUDA_SUCCESS"}, {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {3, "CUDA_ERROR_NOT_INITIALIZED"},
    {100, "CUDA_ERROR_NO_DEVICE"}, {101, "CUDA_ERROR_INVALID_DEVICE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"}, {218, "CUDA_ERROR_INVALID_PTX"}, {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
    {400, "CUDA_ERROR_INVALID_HANDLE"}, {500, "CUDA_ERROR_NOT_FOUND"}, {600, "CUDA_ERROR_NOT_READY"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"}, {716, "CUDA_ERROR_MISALIGNED_ADDRESS"}, {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"}, {719, "CUDA_ERROR_LAUNCH_FAILED"}, {801, "CUDA_ERROR_NOT_SUPPORTED"}};

// How far each stream has come, by the stream's number: an operation happens after another one whose place in its
// stream is not beyond the clock that the operation was submitted with.
typedef std::map<u64, u64> Clock;

void join(Clock& into, const Clock& other) {
    for (const auto& [stream, place] : other) {
        u64& mine = into[stream];
        if (mine < place) mine = place;
    }
}

struct Range {
    u64 from, to;
    bool operator<(const Range& other) const { return from < other.from; }
};

// Sorted, without overlaps and gaps of nothing.
void tidy(std::vector<Range>& ranges) {
    std::sort(ranges.begin(), ranges.end());
    std::size_t kept = 0;
    for (const Range& one : ranges) {
        if (kept > 0 && one.from <= ranges[kept - 1].to)
            ranges[kept - 1].to = std::max(ranges[kept - 1].to, one.to);
        else
            ranges[kept++] = one;
    }
    ranges.resize(kept);
}

bool overlap(const std::vector<Range>& a, const std::vector<Range>& b) {
    for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
        if (a[i].from < b[j].to && b[j].from < a[i].to) return true;
        if (a[i].to <= b[j].to)
            ++i;
        else
            ++j;
    }
    return false;
}

// What an operation on a stream reads and writes.
struct Access {
    const char* what = "";
    u64 stream = 0, place = 0;
    Clock clock;
    std::vector<Range> reads, writes;
};

struct Event {
    Clock clock;  // of the operation that it was recorded after
    u64 recorded = 0, reached = 0;  // how often it was recorded, and which of these was reached
};

struct Op {
    std::function<Result(Access&)> work;
    Access access;
    bool data;  // counts against the gate, and is delayed
};

struct Stream {
    u64 number = 0;
    Clock clock;
    std::deque<Op> ops;
    u64 submitted = 0, done = 0;
    long running = 0;  // copies and kernels not over
    bool ending = false;
    std::thread worker;
};

struct Module {
    std::set<std::string> entries;
    std::vector<std::unique_ptr<std::string>> functions;
};

struct World {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<u64, u64> device, pinned;  // address -> bytes
    std::map<u64, int> owner;           // address of device memory -> the GPU it is on
    Stream* standard = nullptr;         // the default stream, by the handle 0
    std::set<u64> allocated;            // those of pinned that cuMemHostAlloc made
    std::set<Stream*> streams;
    std::map<Event*, std::shared_ptr<Event>> events;
    std::set<Module*> modules;
    std::set<std::string*> functions;
    std::map<std::string, long> calls, settings;
    std::map<std::string, std::pair<long, Result>> faults;  // calls until the fault (negative: each) and its code
    std::deque<Access> log;  // operations that others may still have to be ordered with
    Clock host;              // what the host has seen the end of
    u64 numbered = 0;
    long races = 0;
    Result sticky = OK;
    long gate = -1, retained = 0;
    bool initialised = false;
};

World& world() {
    static World* one = new World;  // never destroyed: threads may outlive main
    return *one;
}
typedef std::unique_lock<std::mutex> Guard;

thread_local std::vector<void*> contexts;
int the_context;

long setting(const char* name, long otherwise) {
    const auto found = world().settings.find(name);
    return found == world().settings.end() ? otherwise : found->second;
}

// Counts a call; what it must fail with, if anything. Under the mutex.
Result entered(const char* name, bool needs_context = true) {
    World& w = world();
    ++w.calls[name];
    const auto fault = w.faults.find(name);
    if (fault != w.faults.end()) {
        if (fault->second.first < 0) return fault->second.second;
        if (--fault->second.first == 0) {
            const Result code = fault->second.second;
            w.faults.erase(fault);
            return code;
        }
    }
    if (w.sticky != OK) return w.sticky;
    if (!w.initialised) return NOT_INITIALIZED;
    if (needs_context && (contexts.empty() || contexts.back() != &the_context)) return INVALID_CONTEXT;
    if (needs_context && w.retained < 1) return CONTEXT_IS_DESTROYED;
    return OK;
}
#define ENTER(name, ...)                                                  \
    Guard guard(world().mutex);                                           \
    if (const Result wrong = entered(name, ##__VA_ARGS__)) return wrong

bool inside(const std::map<u64, u64>& ranges, u64 address, u64 bytes) {
    auto after = ranges.upper_bound(address);
    if (after == ranges.begin()) return false;
    --after;
    return address + bytes <= after->first + after->second;
}

constexpr std::size_t kLogged = 4096;

bool after(const Access& later, const Access& earlier) {
    const auto found = later.clock.find(earlier.stream);
    return found != later.clock.end() && found->second >= earlier.place;
}

bool conflict(const Access& a, const Access& b) {
    return overlap(a.writes, b.writes) || overlap(a.writes, b.reads) || overlap(a.reads, b.writes);
}

// Compares an operation with those that are not ordered with it. The answer does not depend on which ran first. Under
// the mutex.
void look_for_races(Access&& access) {
    World& w = world();
    tidy(access.reads);
    tidy(access.writes);
    for (const Access& other : w.log)
        if (other.stream != access.stream && !after(access, other) && !after(other, access) && conflict(access, other)) {
            if (w.races++ == 0) std::fprintf(stderr, "stand-in: %s races with %s\n", access.what, other.what);
        }
    w.log.push_back(std::move(access));
    if (w.log.size() > kLogged) w.log.pop_front();
}

// The host has seen the end of what a clock covers, so later operations come after it. Under the mutex.
void seen(const Clock& clock) {
    World& w = world();
    join(w.host, clock);
    for (const Stream* stream : w.streams)
        if (stream->done != stream->submitted) return;  // an operation without this knowledge may still run
    w.log.erase(std::remove_if(w.log.begin(), w.log.end(),
                               [&](const Access& one) {
                                   const auto found = w.host.find(one.stream);
                                   return found != w.host.end() && found->second >= one.place;
                               }),
                w.log.end());
}

// Freeing memory waits for the work that uses it. Under the mutex.
void forget_accesses(u64 address, u64 bytes) {
    const auto gone = [&](const Range& one) { return one.from < address + bytes && address < one.to; };
    for (Access& access : world().log)
        for (std::vector<Range>* ranges : {&access.reads, &access.writes})
            ranges->erase(std::remove_if(ranges->begin(), ranges->end(), gone), ranges->end());
}

void run_stream(Stream* stream) {
    World& w = world();
    Guard guard(w.mutex);
    while (true) {
        w.changed.wait(guard, [&] {
            return stream->ending ||
                   (!stream->ops.empty() && (w.sticky != OK || !stream->ops.front().data || w.gate != 0));
        });
        if (stream->ops.empty() || (stream->ending && w.gate == 0)) return;
        Op op = std::move(stream->ops.front());
        stream->ops.pop_front();
        if (w.sticky == OK) {
            if (op.data && w.gate > 0) --w.gate;
            const long delay = op.data ? setting("delay_us", 0) : 0;
            guard.unlock();
            if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
            const Result result = op.work(op.access);
            guard.lock();
            if (op.data) look_for_races(std::move(op.access));
            if (result != OK && w.sticky == OK) w.sticky = result;
        }
        ++stream->done;
        stream->running -= op.data;
        w.changed.notify_all();
    }
}

// Under the mutex.
void enqueue(Stream* stream, bool data, std::function<Result(Access&)> work, const char* what = "") {
    Access access;
    join(stream->clock, world().host);
    access.what = what;
    access.stream = stream->number;
    access.place = ++stream->clock[stream->number];
    access.clock = stream->clock;
    stream->ops.push_back({std::move(work), std::move(access), data});
    ++stream->submitted;
    stream->running += data;
    world().changed.notify_all();
}

// What a failed device has not run is dropped, also where a stream's thread has not come to it yet: it would run later,
// beside the work of the device that was reset.
void drop_after_failure(Guard& guard) {
    World& w = world();
    const auto dropped = [&] {
        return std::all_of(w.streams.begin(), w.streams.end(), [](Stream* one) { return one->done == one->submitted; });
    };
    if (w.sticky != OK) w.changed.wait_for(guard, std::chrono::seconds(10), dropped);
}

bool known(Stream* stream) { return world().streams.count(stream) != 0 || (stream != nullptr && stream == world().standard); }

// The stream of a handle: 0 is the default one, made on first use. Under the mutex.
Stream* stream_of(Stream* handle) {
    World& w = world();
    if (handle != nullptr) return handle;
    if (w.standard == nullptr) {
        w.standard = new Stream;
        w.standard->number = ++w.numbered;
        w.standard->worker = std::thread(run_stream, w.standard);
    }
    return w.standard;
}

// What a copy does when its turn has come: the device's side may have been freed meanwhile.
Result copy_now(u64 to, u64 from, u64 bytes, u64 device, Access& access) {
    Guard guard(world().mutex);
    access.writes.push_back({to, to + bytes});
    access.reads.push_back({from, from + bytes});
    if (!inside(world().device, device, bytes)) return ILLEGAL_ADDRESS;
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    return OK;
}

Result copy_async(u64 to, u64 from, u64 bytes, u64 device, u64 host, Stream* stream) {
    World& w = world();
    if (!known(stream)) return INVALID_HANDLE;
    if (!inside(w.device, device, bytes)) return INVALID_VALUE;
    if (!inside(w.pinned, host, bytes)) ++w.calls["pageable"];
    enqueue(stream, true, [=](Access& access) { return copy_now(to, from, bytes, device, access); }, "a copy");
    return OK;
}

struct Attributes {
    int order, from_type, from_id, to_type, to_id;
    unsigned flags;
};

Result batch(const char* name, const u64* to, const u64* from, const std::size_t* sizes, std::size_t count,
             const Attributes* attributes, const std::size_t* starts, std::size_t kinds, std::size_t* failed, Stream* stream) {
    World& w = world();
    Guard guard(w.mutex);
    const Result wrong = entered(name);
    if (wrong == OK && (stream == nullptr || count == 0 || kinds != 1 || starts[0] != 0 || attributes->order < 1 ||
                        attributes->order > 3))
        return INVALID_VALUE;
    if (!known(stream)) return INVALID_HANDLE;
    const std::size_t taken = wrong == OK ? count : count / 2;  // a batch refused may have begun
    std::vector<u64> copies;
    std::vector<Range> written;
    for (std::size_t i = taken; i-- > 0;) {  // no order among the copies of a batch
        const bool up = inside(w.device, to[i], sizes[i]);
        const u64 device = up ? to[i] : from[i], host = up ? from[i] : to[i];
        if (sizes[i] == 0 || !inside(w.device, device, sizes[i])) {
            if (failed != nullptr) *failed = i;
            return INVALID_VALUE;
        }
        if (!inside(w.pinned, host, sizes[i])) ++w.calls["pageable"];
        copies.insert(copies.end(), {to[i], from[i], sizes[i], device});
        written.push_back({to[i], to[i] + sizes[i]});
    }
    w.calls["pieces"] += long(taken);
    std::sort(written.begin(), written.end());
    for (std::size_t i = 1; i < written.size(); ++i)
        if (written[i].from < written[i - 1].to) ++w.races;
    enqueue(
        stream, true,
        [copies](Access& access) {
            for (std::size_t i = 0; i < copies.size(); i += 4)
                if (const Result result = copy_now(copies[i], copies[i + 1], copies[i + 2], copies[i + 3], access)) return result;
            return Result(OK);
        },
        "a batch");
    if (wrong != OK && failed != nullptr) *failed = taken;
    return wrong;
}

struct Launch {
    const kvactors_cuda::Piece* table;
    long long pieces;
    const long long *blocks, *ids;
    long long pairs, slots, stride;
    bool gather;
    unsigned grid, threads;
};

// Under the mutex. Whether every address that the kernel would touch lies where it may. Notes what it touches.
bool permitted(const Launch& l, Access& access) {
    World& w = world();
    const auto readable = [&](const void* at, u64 bytes) {
        const u64 address = reinterpret_cast<u64>(at);
        return inside(w.device, address, bytes) || inside(w.pinned, address, bytes);
    };
    if (!readable(l.table, u64(l.pieces) * sizeof *l.table) || !readable(l.blocks, u64(l.pairs) * 8) ||
        !readable(l.ids, u64(l.pairs) * 8))
        return false;
    const auto note = [](std::vector<Range>& ranges, u64 from, u64 bytes) { ranges.push_back({from, from + bytes}); };
    note(access.reads, reinterpret_cast<u64>(l.table), u64(l.pieces) * sizeof *l.table);
    note(access.reads, reinterpret_cast<u64>(l.blocks), u64(l.pairs) * 8);
    note(access.reads, reinterpret_cast<u64>(l.ids), u64(l.pairs) * 8);
    for (long long j = 0; j < l.pairs; ++j)
        for (long long p = 0; p < l.pieces; ++p) {
            const kvactors_cuda::Piece& piece = l.table[p];
            const u64 block = u64(piece.region + l.blocks[j] * piece.bytes);
            const u64 slot = u64(l.slots + l.ids[j] * l.stride + piece.offset);
            if (!inside(w.device, block, u64(piece.bytes)) || !readable(reinterpret_cast<const void*>(slot), u64(piece.bytes)))
                return false;
            note(l.gather ? access.reads : access.writes, block, u64(piece.bytes));
            note(l.gather ? access.writes : access.reads, slot, u64(piece.bytes));
        }
    return true;
}

Result launch_now(const Launch& l, Access& access) {
    const auto misaligned = [](const void* at) { return reinterpret_cast<u64>(at) % 8 != 0; };
    if (misaligned(l.table) || misaligned(l.blocks) || misaligned(l.ids)) return MISALIGNED_ADDRESS;
    {
        Guard guard(world().mutex);
        if (!permitted(l, access)) return ILLEGAL_ADDRESS;
    }
    kvactors_cuda::misaligned = false;
    kvactors_cuda::play(l.gather ? kvactors_gather : kvactors_scatter, l.grid, l.threads, l.table, l.pieces, l.blocks, l.ids,
                        l.pairs, l.slots, l.stride);
    return kvactors_cuda::misaligned ? MISALIGNED_ADDRESS : OK;
}

}  // namespace

// ---- what tests turn

API void fake_reset() {
    World& w = world();
    Guard guard(w.mutex);
    drop_after_failure(guard);
    w.calls.clear();
    w.settings.clear();
    w.faults.clear();
    w.sticky = OK;
    w.gate = -1;
    w.changed.notify_all();
}
API void fake_set(const char* name, long value) {
    Guard guard(world().mutex);
    world().settings[name] = value;
}
API void fake_fail(const char* name, long nth, int code) {
    Guard guard(world().mutex);
    if (nth == 0)
        world().faults.erase(name);
    else
        world().faults[name] = {nth, code};
}
API void fake_gate(long ops) {
    Guard guard(world().mutex);
    world().gate = ops;
    world().changed.notify_all();
}
API void fake_sticky(int code) {
    Guard guard(world().mutex);
    if (code == OK) drop_after_failure(guard);
    world().sticky = code;
    world().changed.notify_all();
}
// A device that is reset frees whatever its context had: streams, events, modules and memory.
API void fake_forget() {
    World& w = world();
    std::vector<Stream*> ended;
    {
        Guard guard(w.mutex);
        for (Stream* stream : w.streams) {
            stream->ending = true;
            ended.push_back(stream);
        }
        w.streams.clear();
        w.events.clear();
        w.functions.clear();
        for (Module* module : w.modules) delete module;
        w.modules.clear();
        for (const auto& range : w.device) std::free(reinterpret_cast<void*>(range.first));
        w.device.clear();
        w.owner.clear();
        for (const u64 address : w.allocated) std::free(reinterpret_cast<void*>(address));
        w.allocated.clear();
        w.pinned.clear();
        w.retained = 0;
        w.log.clear();
        w.changed.notify_all();
    }
    for (Stream* stream : ended) {
        stream->worker.join();
        delete stream;
    }
}
// Races that a test has made on purpose.
API void fake_forgive() {
    Guard guard(world().mutex);
    world().races = 0;
    world().log.clear();
}
API long fake_calls(const char* name) {
    Guard guard(world().mutex);
    return world().calls[name];
}
API long fake_live(const char* what) {
    World& w = world();
    Guard guard(w.mutex);
    const std::string name = what;
    if (name == "device") return long(w.device.size());
    if (name == "pinned") return long(w.pinned.size());
    if (name == "streams") return long(w.streams.size());
    if (name == "events") return long(w.events.size());
    if (name == "modules") return long(w.modules.size());
    if (name == "contexts") return w.retained;
    if (name == "current") return long(contexts.size());
    if (name == "races") return w.races;
    long running = 0;
    for (const Stream* stream : w.streams) running += stream->running;
    return running;
}

// ---- the driver

API Result cuInit(unsigned) {
    Guard guard(world().mutex);
    world().initialised = true;
    return entered("cuInit", false);
}
API Result cuDriverGetVersion(int* version) {
    ENTER("cuDriverGetVersion", false);
    *version = int(setting("version", 13000));
    return OK;
}
API Result cuDeviceGetCount(int* count) {
    ENTER("cuDeviceGetCount", false);
    *count = int(setting("devices", 1));
    return OK;
}
API Result cuDeviceGet(int* device, int ordinal) {
    ENTER("cuDeviceGet", false);
    if (ordinal < 0 || ordinal >= setting("devices", 1)) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}
API Result cuDeviceGetName(char* name, int bytes, int) {
    ENTER("cuDeviceGetName", false);
    std::strncpy(name, "Stand-in", std::size_t(bytes));
    return OK;
}
API Result cuDeviceGetAttribute(int* value, int attribute, int) {
    ENTER("cuDeviceGetAttribute", false);
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : 1;
    if (attribute == 11) *value = int(setting("max_pitch", 0x7fffffff));
    return OK;
}
API Result cuDevicePrimaryCtxRetain(void** context, int) {
    ENTER("cuDevicePrimaryCtxRetain", false);
    ++world().retained;
    *context = &the_context;
    return OK;
}
API Result cuDevicePrimaryCtxRelease_v2(int) {
    ENTER("cuDevicePrimaryCtxRelease", false);
    --world().retained;
    return OK;
}
API Result cuCtxSetCurrent(void* context) {
    ENTER("cuCtxSetCurrent", false);
    contexts.assign(context == nullptr ? 0 : 1, context);
    return OK;
}
API Result cuCtxPushCurrent_v2(void* context) {
    ENTER("cuCtxPushCurrent", false);
    contexts.push_back(context);
    return OK;
}
API Result cuCtxPopCurrent_v2(void** context) {
    Guard guard(world().mutex);  // the thread's own stack: works in a broken context, too
    const Result wrong = entered("cuCtxPopCurrent", false);
    if (contexts.empty()) return INVALID_CONTEXT;
    if (context != nullptr) *context = contexts.back();
    contexts.pop_back();
    return wrong;
}
API Result cuGetErrorName(Result code, const char** name) {
    const auto found = kNames.find(code);
    *name = found == kNames.end() ? nullptr : found->second;
    return found == kNames.end() ? INVALID_VALUE : OK;
}
API Result cuGetErrorString(Result code, const char** text) { return cuGetErrorName(code, text); }

API Result cuMemAlloc_v2(u64* address, std::size_t bytes) {
    ENTER("cuMemAlloc");
    if (bytes == 0) return INVALID_VALUE;
    void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (memory == nullptr) return OUT_OF_MEMORY;
    std::memset(memory, 0xcd, bytes);
    *address = reinterpret_cast<u64>(memory);
    world().device[*address] = bytes;
    world().owner[*address] = int(setting("allocate_on", 0));
    return OK;
}
API Result cuMemFree_v2(u64 address) {
    ENTER("cuMemFree");
    const auto found = world().device.find(address);
    if (found == world().device.end()) return INVALID_VALUE;
    forget_accesses(address, found->second);
    world().device.erase(found);
    world().owner.erase(address);
    std::free(reinterpret_cast<void*>(address));
    return OK;
}
API Result cuMemHostAlloc(void** address, std::size_t bytes, unsigned) {
    ENTER("cuMemHostAlloc");
    *address = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (*address == nullptr) return OUT_OF_MEMORY;
    world().pinned[reinterpret_cast<u64>(*address)] = bytes;
    world().allocated.insert(reinterpret_cast<u64>(*address));
    return OK;
}
API Result cuMemFreeHost(void* address) {
    ENTER("cuMemFreeHost");
    const u64 key = reinterpret_cast<u64>(address);
    if (world().allocated.erase(key) == 0) return INVALID_VALUE;
    forget_accesses(key, world().pinned[key]);
    world().pinned.erase(key);
    std::free(address);
    return OK;
}
API Result cuMemHostRegister_v2(void* address, std::size_t bytes, unsigned) {
    ENTER("cuMemHostRegister");
    const u64 key = reinterpret_cast<u64>(address);
    if (bytes == 0) return INVALID_VALUE;
    for (const auto& range : world().pinned)
        if (key < range.first + range.second && range.first < key + bytes) return ALREADY_REGISTERED;
    world().pinned[key] = bytes;
    return OK;
}
API Result cuMemHostUnregister(void* address) {
    ENTER("cuMemHostUnregister");
    const u64 key = reinterpret_cast<u64>(address);
    const auto found = world().pinned.find(key);
    if (world().allocated.count(key) != 0 || found == world().pinned.end()) return NOT_REGISTERED;
    forget_accesses(key, found->second);
    world().pinned.erase(found);
    return OK;
}
API Result cuMemHostGetDevicePointer_v2(u64* device, void* address, unsigned) {
    ENTER("cuMemHostGetDevicePointer");
    if (!inside(world().pinned, reinterpret_cast<u64>(address), 1)) return INVALID_VALUE;
    *device = reinterpret_cast<u64>(address);
    return OK;
}
API Result cuMemGetAddressRange_v2(u64* base, std::size_t* bytes, u64 address) {
    ENTER("cuMemGetAddressRange");
    auto found = world().device.upper_bound(address);
    if (found == world().device.begin() || !inside(world().device, address, 1)) return NOT_FOUND;
    --found;
    if (base != nullptr) *base = found->first;
    if (bytes != nullptr) *bytes = found->second;
    return OK;
}
API Result cuPointerGetAttribute(void* value, int attribute, u64 address) {
    ENTER("cuPointerGetAttribute");
    const bool device = inside(world().device, address, 1);
    if (!device && !inside(world().pinned, address, 1)) return INVALID_VALUE;
    if (attribute == 2)  // the kind of memory
        *static_cast<int*>(value) = device ? 2 : 1;
    else  // the device's number
        *static_cast<int*>(value) = device ? std::prev(world().owner.upper_bound(address))->second : 0;
    return OK;
}

API Result cuStreamCreate(Stream** stream, unsigned) {
    ENTER("cuStreamCreate");
    *stream = new Stream;
    (*stream)->number = ++world().numbered;
    world().streams.insert(*stream);
    (*stream)->worker = std::thread(run_stream, *stream);
    return OK;
}
API Result cuStreamDestroy_v2(Stream* stream) {
    {
        ENTER("cuStreamDestroy");
        if (world().streams.erase(stream) == 0) return INVALID_HANDLE;
        stream->ending = true;
        world().changed.notify_all();
    }
    stream->worker.join();
    delete stream;
    return OK;
}
API Result cuStreamSynchronize(Stream* stream) {
    ENTER("cuStreamSynchronize");
    stream = stream_of(stream);
    World& w = world();
    if (!known(stream)) return INVALID_HANDLE;
    const u64 target = stream->submitted;
    const Clock clock = stream->clock;
    w.changed.wait(guard, [&] { return w.sticky != OK || stream->done >= target; });
    if (w.sticky == OK) seen(clock);
    return w.sticky;
}
API Result cuStreamQuery(Stream* stream) {
    ENTER("cuStreamQuery");
    if (!known(stream)) return INVALID_HANDLE;
    return stream->done == stream->submitted ? OK : NOT_READY;
}
API Result cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    ENTER("cuStreamWaitEvent");
    stream = stream_of(stream);
    World& w = world();
    const auto found = w.events.find(event);
    if (!known(stream) || found == w.events.end()) return INVALID_HANDLE;
    const std::shared_ptr<Event> kept = found->second;
    const u64 target = kept->recorded;
    join(stream->clock, kept->clock);
    enqueue(stream, false, [kept, target](Access&) {
        World& inner = world();
        Guard lock(inner.mutex);
        inner.changed.wait(lock, [&] { return inner.sticky != OK || kept->reached >= target; });
        return inner.sticky;
    });
    return OK;
}
API Result cuLaunchHostFunc(Stream* stream, void (*function)(void*), void* data) {
    ENTER("cuLaunchHostFunc");
    stream = stream_of(stream);
    if (!known(stream)) return INVALID_HANDLE;
    enqueue(stream, true, [=](Access&) {
        function(data);
        return Result(OK);
    });
    return OK;
}

API Result cuEventCreate(Event** event, unsigned) {
    ENTER("cuEventCreate");
    auto made = std::make_shared<Event>();
    *event = made.get();
    world().events[made.get()] = made;
    return OK;
}
API Result cuEventDestroy_v2(Event* event) {
    ENTER("cuEventDestroy");
    return world().events.erase(event) == 0 ? INVALID_HANDLE : OK;
}
API Result cuEventRecord(Event* event, Stream* stream) {
    ENTER("cuEventRecord");
    stream = stream_of(stream);
    const auto found = world().events.find(event);
    if (!known(stream) || found == world().events.end()) return INVALID_HANDLE;
    const std::shared_ptr<Event> kept = found->second;
    const u64 number = ++kept->recorded;
    join(stream->clock, world().host);
    kept->clock = stream->clock;
    enqueue(stream, false, [kept, number](Access&) {
        Guard lock(world().mutex);
        kept->reached = number;
        world().changed.notify_all();
        return Result(OK);
    });
    return OK;
}
API Result cuEventQuery(Event* event) {
    ENTER("cuEventQuery");
    if (world().events.count(event) == 0) return INVALID_HANDLE;
    if (event->reached != event->recorded) return NOT_READY;
    seen(event->clock);
    return OK;
}
API Result cuEventSynchronize(Event* event) {
    ENTER("cuEventSynchronize");
    World& w = world();
    if (w.events.count(event) == 0) return INVALID_HANDLE;
    const std::shared_ptr<Event> kept = w.events[event];
    w.changed.wait(guard, [&] { return w.sticky != OK || kept->reached == kept->recorded; });
    if (w.sticky == OK) seen(kept->clock);
    return w.sticky;
}
API Result cuMemcpyHtoDAsync_v2(u64 to, const void* from, std::size_t bytes, Stream* stream) {
    ENTER("cuMemcpyHtoDAsync");
    return copy_async(to, reinterpret_cast<u64>(from), bytes, to, reinterpret_cast<u64>(from), stream);
}
API Result cuMemcpyDtoHAsync_v2(void* to, u64 from, std::size_t bytes, Stream* stream) {
    ENTER("cuMemcpyDtoHAsync");
    return copy_async(reinterpret_cast<u64>(to), from, bytes, from, reinterpret_cast<u64>(to), stream);
}
API Result cuMemcpyDtoDAsync_v2(u64 to, u64 from, std::size_t bytes, Stream* stream) {
    ENTER("cuMemcpyDtoDAsync");
    if (!known(stream)) return INVALID_HANDLE;
    if (!inside(world().device, to, bytes) || !inside(world().device, from, bytes)) return INVALID_VALUE;
    enqueue(stream, true, [=](Access& access) { return copy_now(to, from, bytes, from, access); }, "a copy within");
    return OK;
}
API Result cuMemcpyBatchAsync(u64* to, u64* from, std::size_t* sizes, std::size_t count, Attributes* attributes,
                              std::size_t* starts, std::size_t kinds, std::size_t* failed, Stream* stream) {
    return batch("cuMemcpyBatchAsync", to, from, sizes, count, attributes, starts, kinds, failed, stream);
}
API Result cuMemcpyBatchAsync_v2(const u64* to, const u64* from, const std::size_t* sizes, std::size_t count,
                                 Attributes* attributes, std::size_t* starts, std::size_t kinds, Stream* stream) {
    return batch("cuMemcpyBatchAsync", to, from, sizes, count, attributes, starts, kinds, nullptr, stream);
}

API Result cuModuleLoadData(Module** module, const void* image) {
    ENTER("cuModuleLoadData");
    const std::string text = static_cast<const char*>(image);
    auto made = std::make_unique<Module>();
    for (std::size_t at = text.find(".entry"); at != std::string::npos; at = text.find(".entry", at + 1)) {
        const std::size_t from = text.find_first_not_of(" \t", at + 6);
        made->entries.insert(text.substr(from, text.find_first_of(" (\n", from) - from));
    }
    if (text.find(".version") == std::string::npos || made->entries.empty()) return INVALID_PTX;
    *module = made.release();
    world().modules.insert(*module);
    return OK;
}
API Result cuModuleUnload(Module* module) {
    ENTER("cuModuleUnload");
    if (world().modules.erase(module) == 0) return INVALID_HANDLE;
    for (const auto& function : module->functions) world().functions.erase(function.get());
    delete module;
    return OK;
}
API Result cuModuleGetFunction(std::string** function, Module* module, const char* name) {
    ENTER("cuModuleGetFunction");
    if (world().modules.count(module) == 0) return INVALID_HANDLE;
    if (module->entries.count(name) == 0) return NOT_FOUND;
    module->functions.push_back(std::make_unique<std::string>(name));
    *function = module->functions.back().get();
    world().functions.insert(*function);
    return OK;
}
API Result cuLaunchKernel(std::string* function, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned threads, unsigned y,
                          unsigned z, unsigned shared, Stream* stream, void** parameters, void** extra) {
    ENTER("cuLaunchKernel");
    if (world().functions.count(function) == 0 || !known(stream)) return INVALID_HANDLE;
    if (grid == 0 || threads == 0 || threads > 256 || grid_y != 1 || grid_z != 1 || y != 1 || z != 1 || shared || extra)
        return INVALID_VALUE;
    Launch l;
    const auto read = [&](int i, auto& field) { std::memcpy(&field, parameters[i], 8); };
    read(0, l.table), read(1, l.pieces), read(2, l.blocks), read(3, l.ids), read(4, l.pairs), read(5, l.slots), read(6, l.stride);
    l.gather = *function == "kvactors_gather";
    l.grid = grid;
    l.threads = threads;
    enqueue(stream, true, [l](Access& access) { return launch_now(l, access); }, l.gather ? "a gather" : "a scatter");
    return OK;
}

// Newer than the version asked for is not found; nor what a test has taken away by fake_set("no NAME", 1).
API Result cuGetProcAddress_v2(const char* symbol, void** function, int version, u64 flags, int* status);
#include "symbols.inc"
