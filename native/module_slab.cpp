// Binding of the slab queue: checks of slots and memory, and references to memory in use.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "gil.hpp"
#include "slab_queue.hpp"
#include "xxh3.hpp"

namespace nb = nanobind;

namespace kvactors {
namespace {

constexpr std::uintptr_t kAligned = 4096;

// Memory whose slots are whole pages, so that a slot may be moved to its end.
struct ArenaSpan {
    std::uintptr_t address = 0;
    std::size_t bytes = 0, stride = 0;
};

class BoundSlabs {
public:
    BoundSlabs(unsigned read_threads, unsigned write_threads, int niceness) {
        for (const unsigned threads : {read_threads, write_threads})
            if (threads < 1 || threads > 1024) throw nb::value_error("threads must be between 1 and 1024");
        queue_ = std::make_unique<SlabQueue>(read_threads, write_threads, niceness);
    }
    ~BoundSlabs() {
        queue_->stop();
        if (queue_->in_flight() > 0)
            for (auto& [number, memory] : memory_) memory.release();  // a thread may still access it
    }
    BoundSlabs(const BoundSlabs&) = delete;
    BoundSlabs& operator=(const BoundSlabs&) = delete;

    void bind(int folder, int table, nb::bytes table_path, i64 table_inode, int flags, std::size_t size,
              std::size_t stride, std::size_t entry_bytes, std::size_t slots_per_slab) {
        if (size < 1 || stride < size || stride % kAligned != 0 || entry_bytes < 128 || slots_per_slab < 1)
            throw nb::value_error("sizes of the slabs out of range");
        SlabFiles& files = queue_->files;
        files.folder = folder;
        files.table = table;
        files.table_path = std::string(table_path.c_str(), table_path.size());
        files.table_inode = table_inode;
        files.flags = flags;
        files.size = size;
        files.stride = stride;
        files.entry_bytes = entry_bytes;
        files.slots_per_slab = slots_per_slab;
    }

    void set_slabs(std::vector<int> descriptors) { slabs_ = std::move(descriptors); }

    void set_arena(std::uintptr_t address, std::size_t bytes, std::size_t stride) { arena_ = {address, bytes, stride}; }

    u64 submit(bool writes, bool direct, const std::vector<i64>& slots, nb::list views, nb::bytes records) {
        const SlabFiles& files = queue_->files;
        const std::size_t record = writes ? files.entry_bytes : 16;
        if (views.size() != slots.size()) throw nb::value_error("slots and views differ in length");
        if (records.size() != record * slots.size()) throw nb::value_error("records of a wrong length");
        std::vector<SlabItem> items;
        items.reserve(slots.size());
        for (std::size_t i = 0; i < slots.size(); ++i) {
            check(slots[i]);
            items.push_back(item(slots[i], nb::handle(views[i]), writes));
        }
        const u64 number = queue_->submit(writes ? SlabWork::kWrite : SlabWork::kRead, direct, std::move(items),
                                          std::string(records.c_str(), records.size()));
        memory_[number] = std::move(views);
        return number;
    }

    u64 seal(bool direct, bool sync, const std::vector<i64>& slots, nb::bytes entries) {
        if (entries.size() != queue_->files.entry_bytes * slots.size()) throw nb::value_error("entries of a wrong length");
        return queue_->submit(SlabWork::kSeal, direct, places(slots), std::string(entries.c_str(), entries.size()), sync);
    }

    u64 erase(const std::vector<i64>& slots) { return queue_->submit(SlabWork::kErase, false, places(slots), {}); }

    std::vector<std::tuple<u64, std::vector<int>, nb::bytes>> take_ended() {
        std::vector<std::tuple<u64, std::vector<int>, nb::bytes>> found;
        for (SlabQueue::Ended& one : queue_->take_ended()) {
            found.emplace_back(one.number, std::move(one.outcomes), nb::bytes(one.records.data(), one.records.size()));
            memory_.erase(one.number);
        }
        return found;
    }

    void cancel(u64 number) { queue_->cancel(number); }

    bool wait_idle(double seconds) {
        const ReleasedGil released;
        return queue_->wait_idle(seconds);
    }

    bool close(double seconds) {
        queue_->stop();
        const ReleasedGil released;
        return queue_->finish(seconds);
    }

    void set_calls(std::uintptr_t read, std::uintptr_t write, std::uintptr_t inode, std::uintptr_t sync) {
        SlabCalls calls = kSystemCalls;
        if (read != 0) calls.read = reinterpret_cast<decltype(calls.read)>(read);
        if (write != 0) calls.write = reinterpret_cast<decltype(calls.write)>(write);
        if (inode != 0) calls.inode = reinterpret_cast<decltype(calls.inode)>(inode);
        if (sync != 0) calls.sync = reinterpret_cast<decltype(calls.sync)>(sync);
        queue_->set_calls(calls);
    }

    std::size_t in_flight() const { return queue_->in_flight(); }
    int event_fd() const { return queue_->event_fd(); }

private:
    void check(i64 slot) const {
        if (slot < 0 || slot >= i64(slabs_.size()) * i64(queue_->files.slots_per_slab)) throw nb::value_error("slot out of range");
    }

    std::vector<SlabItem> places(const std::vector<i64>& slots) const {
        std::vector<SlabItem> items;
        items.reserve(slots.size());
        for (const i64 slot : slots) {
            check(slot);
            items.push_back({slabs_[std::size_t(slot) / queue_->files.slots_per_slab], false, slot, nullptr});
        }
        return items;
    }

    SlabItem item(i64 slot, nb::handle view, bool writes) const {
        const SlabFiles& files = queue_->files;
        Py_buffer buffer;
        if (PyObject_GetBuffer(view.ptr(), &buffer, writes ? PyBUF_SIMPLE : PyBUF_WRITABLE) != 0) throw nb::python_error();
        const auto address = reinterpret_cast<std::uintptr_t>(buffer.buf);
        const std::size_t bytes = std::size_t(buffer.len);
        PyBuffer_Release(&buffer);  // the view keeps the memory, and the queue keeps the view
        if (bytes < files.size) throw nb::value_error("a view is smaller than an object");
        const bool inside = address - arena_.address < arena_.bytes;  // wraps around below
        const std::size_t space = inside ? arena_.stride - (address - arena_.address) % arena_.stride : bytes;
        const bool whole = address % kAligned == 0 && space >= files.stride;
        return {slabs_[std::size_t(slot) / files.slots_per_slab], whole, slot, reinterpret_cast<u8*>(address)};
    }

    ArenaSpan arena_;
    std::vector<int> slabs_;
    std::unordered_map<u64, nb::list> memory_;  // of jobs in flight
    std::unique_ptr<SlabQueue> queue_;
};

u64 checksum(nb::handle data, bool plain) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(data.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
    const u8* const bytes = static_cast<const u8*>(buffer.buf);
    const u64 sum = (plain ? xxh3_64_plain : xxh3_64)(bytes, std::size_t(buffer.len));
    PyBuffer_Release(&buffer);
    return sum;
}

}  // namespace

void bind_slab_queue(nb::module_& m) {
    nb::class_<BoundSlabs>(m, "SlabQueue")
        .def(nb::init<unsigned, unsigned, int>(), nb::arg("read_threads"), nb::arg("write_threads"), nb::arg("niceness"))
        .def("bind", &BoundSlabs::bind, nb::arg("folder"), nb::arg("table"), nb::arg("table_path"), nb::arg("table_inode"),
             nb::arg("flags"), nb::arg("size"), nb::arg("stride"), nb::arg("entry_bytes"), nb::arg("slots_per_slab"))
        .def("set_slabs", &BoundSlabs::set_slabs, nb::arg("descriptors"))
        .def("set_arena", &BoundSlabs::set_arena, nb::arg("address"), nb::arg("size"), nb::arg("stride"))
        .def("submit", &BoundSlabs::submit, nb::arg("writes"), nb::arg("direct"), nb::arg("slots"), nb::arg("views"),
             nb::arg("records"))
        .def("seal", &BoundSlabs::seal, nb::arg("direct"), nb::arg("sync"), nb::arg("slots"), nb::arg("entries"))
        .def("erase", &BoundSlabs::erase, nb::arg("slots"))
        .def("take_ended", &BoundSlabs::take_ended)
        .def("cancel", &BoundSlabs::cancel, nb::arg("number"))
        .def("wait_idle", &BoundSlabs::wait_idle, nb::arg("seconds"))
        .def("close", &BoundSlabs::close, nb::arg("seconds"))
        .def("set_calls", &BoundSlabs::set_calls, nb::arg("read"), nb::arg("write"), nb::arg("inode"),
             nb::arg("sync"))
        .def_prop_ro("in_flight", &BoundSlabs::in_flight)
        .def_prop_ro("event_fd", &BoundSlabs::event_fd);
    m.def("xxh3_64", &checksum, nb::arg("data"), nb::arg("plain") = false);
}

}  // namespace kvactors
