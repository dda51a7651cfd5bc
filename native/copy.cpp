// Bindings of the copies. They check bounds and release the GIL around the work.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "copy_core.hpp"
#include "give_way.hpp"
#include "gil.hpp"

namespace nb = nanobind;

namespace kvactors {
namespace {

using Ints = nb::ndarray<const i64, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Regions regions_of(const Ints& regions, const Ints& piece_bytes) {
    if (regions.shape(0) != piece_bytes.shape(0)) throw nb::value_error("regions and piece_bytes differ in length");
    for (std::size_t r = 0; r < regions.shape(0); ++r)
        if (piece_bytes.data()[r] < 0) throw nb::value_error("piece_bytes must not be negative");
    return {regions.data(), piece_bytes.data(), regions.shape(0)};
}

void check_ids(const Ints& ids, i64 limit, const char* what) {
    for (std::size_t j = 0; j < ids.shape(0); ++j)
        if (ids.data()[j] < 0 || ids.data()[j] >= limit) throw nb::value_error(what);
}

template <class Copy>
void move(Copy copy, const Ints& regions, const Ints& piece_bytes, i64 region_blocks, const Ints& blocks,
          std::uintptr_t arena, std::size_t stride, i64 num_slots, const Ints& slots) {
    const Regions device = regions_of(regions, piece_bytes);
    if (blocks.shape(0) != slots.shape(0)) throw nb::value_error("blocks and slots differ in length");
    check_ids(blocks, region_blocks, "block id out of range");
    check_ids(slots, num_slots, "slot id out of range");
    std::size_t bytes = 0;
    for (std::size_t r = 0; r < device.count; ++r) bytes += std::size_t(device.piece_bytes[r]);
    if (bytes > stride) throw nb::value_error("a block is larger than a slot");
    const ReleasedGil release;
    copy(device, blocks.data(), Slots{reinterpret_cast<u8*>(arena), stride}, slots.data(), blocks.shape(0));
}

void check_keys(const Ints& blocks, const nb::bytes& keys) {
    if (keys.size() != 32 * blocks.shape(0)) throw nb::value_error("keys must hold 32 bytes for each block");
}

}  // namespace

void bind_copy(nb::module_& m) {
    m.def("gather", [](Ints regions, Ints pieces, i64 region_blocks, Ints blocks, std::uintptr_t arena, std::size_t stride,
                       i64 num_slots, Ints slots) {
        move(gather, regions, pieces, region_blocks, blocks, arena, stride, num_slots, slots);
    }, nb::arg("regions"), nb::arg("piece_bytes"), nb::arg("region_blocks"), nb::arg("blocks"), nb::arg("arena"),
       nb::arg("slot_stride"), nb::arg("num_slots"), nb::arg("slots"));
    m.def("scatter", [](Ints regions, Ints pieces, i64 region_blocks, Ints blocks, std::uintptr_t arena, std::size_t stride,
                        i64 num_slots, Ints slots) {
        move(scatter, regions, pieces, region_blocks, blocks, arena, stride, num_slots, slots);
    }, nb::arg("regions"), nb::arg("piece_bytes"), nb::arg("region_blocks"), nb::arg("blocks"), nb::arg("arena"),
       nb::arg("slot_stride"), nb::arg("num_slots"), nb::arg("slots"));
    m.def("work_in_background", &work_in_background);
    m.def("touch", [](std::uintptr_t address, std::size_t bytes) {
        const ReleasedGil release;
        touch(reinterpret_cast<u8*>(address), bytes);
    }, nb::arg("address"), nb::arg("nbytes"));
    m.def("copy_bytes", [](std::uintptr_t dst, std::uintptr_t src, std::size_t bytes) {
        const ReleasedGil release;
        std::memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes);
    }, nb::arg("dst"), nb::arg("src"), nb::arg("nbytes"));
    m.def("fill_blocks", [](Ints regions, Ints pieces, i64 region_blocks, Ints blocks, nb::bytes keys) {
        const Regions device = regions_of(regions, pieces);
        check_ids(blocks, region_blocks, "block id out of range");
        check_keys(blocks, keys);
        const u8* key = reinterpret_cast<const u8*>(keys.c_str());
        const ReleasedGil release;
        for (std::size_t j = 0; j < blocks.shape(0); ++j) fill_block(device, blocks.data()[j], key + 32 * j);
    }, nb::arg("regions"), nb::arg("piece_bytes"), nb::arg("region_blocks"), nb::arg("blocks"), nb::arg("keys"));
    m.def("check_blocks", [](Ints regions, Ints pieces, i64 region_blocks, Ints blocks, nb::bytes keys) {
        const Regions device = regions_of(regions, pieces);
        check_ids(blocks, region_blocks, "block id out of range");
        check_keys(blocks, keys);
        const u8* key = reinterpret_cast<const u8*>(keys.c_str());
        std::vector<std::size_t> bad;
        const ReleasedGil release;
        for (std::size_t j = 0; j < blocks.shape(0); ++j)
            if (!check_block(device, blocks.data()[j], key + 32 * j)) bad.push_back(j);
        return bad;
    }, nb::arg("regions"), nb::arg("piece_bytes"), nb::arg("region_blocks"), nb::arg("blocks"), nb::arg("keys"));
}

}  // namespace kvactors
