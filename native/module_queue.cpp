// Binding of the copy queue: checks of numbers, and waits without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "copy_queue.hpp"
#include "gil.hpp"

namespace nb = nanobind;

namespace kvactors {
namespace {

using Ints = nb::ndarray<const i64, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<i64> vector_of(const Ints& ints) { return {ints.data(), ints.data() + ints.shape(0)}; }

// A queue, and the limits of its numbers.
class BoundQueue {
public:
    BoundQueue(const Ints& addresses, const Ints& piece_bytes, const Ints& strides, i64 num_blocks, std::uintptr_t memory,
               std::size_t row_stride, std::size_t slots_per_row, i64 num_slots, unsigned threads,
               std::size_t inline_bytes)
        : num_blocks_(num_blocks), num_slots_(num_slots) {
        if (addresses.shape(0) != piece_bytes.shape(0) || addresses.shape(0) != strides.shape(0))
            throw nb::value_error("addresses, piece_bytes and strides differ in length");
        if (threads < 1 || threads > 64) throw nb::value_error("threads must be between 1 and 64");
        if (slots_per_row < 1) throw nb::value_error("slots_per_row must be at least 1");
        std::size_t bytes = 0;
        for (std::size_t r = 0; r < piece_bytes.shape(0); ++r) {
            if (piece_bytes.data()[r] < 1) throw nb::value_error("piece_bytes must be positive");
            if (strides.data()[r] < piece_bytes.data()[r]) throw nb::value_error("a stride is below its piece");
            bytes += std::size_t(piece_bytes.data()[r]);
        }
        if (bytes * slots_per_row > row_stride) throw nb::value_error("the slots of a row are larger than the row");
        const Slots slots{reinterpret_cast<u8*>(memory), row_stride, slots_per_row, bytes};
        queue_ = std::make_unique<CopyQueue>(vector_of(addresses), vector_of(piece_bytes), vector_of(strides), slots,
                                             threads, inline_bytes);
    }

    u64 submit(bool to_host, const Ints& blocks, const Ints& slots) {
        if (blocks.shape(0) != slots.shape(0)) throw nb::value_error("blocks and slots differ in length");
        check(blocks, num_blocks_, "block id out of range");
        check(slots, num_slots_, "slot id out of range");
        return queue_->submit(to_host, vector_of(blocks), vector_of(slots));
    }

    std::vector<std::tuple<u64, std::size_t, double>> take_ended() {
        std::vector<std::tuple<u64, std::size_t, double>> found;
        for (const CopyQueue::Ended& one : queue_->take_ended()) found.emplace_back(one.number, one.bytes, one.seconds);
        return found;
    }

    bool wait(u64 number, double seconds) {
        const std::shared_ptr<CopyJob> job = queue_->find(number);
        if (job == nullptr) return true;
        const ReleasedGil released;
        return queue_->wait(*job, seconds);
    }

    void close() {
        if (!queue_->stop()) return;
        const ReleasedGil released;
        queue_->join();
    }

    std::size_t in_flight() const { return queue_->in_flight(); }

private:
    static void check(const Ints& ids, i64 limit, const char* otherwise) {
        for (std::size_t j = 0; j < ids.shape(0); ++j)
            if (ids.data()[j] < 0 || ids.data()[j] >= limit) throw nb::value_error(otherwise);
    }

    i64 num_blocks_, num_slots_;
    std::unique_ptr<CopyQueue> queue_;
};

}  // namespace

void bind_copy_queue(nb::module_& m) {
    nb::class_<BoundQueue>(m, "CopyQueue")
        .def(nb::init<const Ints&, const Ints&, const Ints&, i64, std::uintptr_t, std::size_t, std::size_t, i64, unsigned,
                      std::size_t>(),
             nb::arg("addresses"), nb::arg("piece_bytes"), nb::arg("strides"), nb::arg("num_blocks"), nb::arg("memory"),
             nb::arg("row_stride"), nb::arg("slots_per_row"), nb::arg("num_slots"), nb::arg("threads"),
             nb::arg("inline_bytes"))
        .def("submit", &BoundQueue::submit, nb::arg("to_host"), nb::arg("blocks"), nb::arg("slots"))
        .def("take_ended", &BoundQueue::take_ended)
        .def("wait", &BoundQueue::wait, nb::arg("number"), nb::arg("seconds"))
        .def("close", &BoundQueue::close)
        .def_prop_ro("in_flight", &BoundQueue::in_flight);
}

}  // namespace kvactors
