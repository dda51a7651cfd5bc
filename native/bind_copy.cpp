#include "bindings.hpp"
#include "copy.hpp"

using namespace nanobind::literals;

namespace kvactors {
namespace {

using Ids = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Regions regions_of(const Ids& addresses, const Ids& piece_bytes, std::int64_t blocks) {
    if (addresses.shape(0) != piece_bytes.shape(0)) throw nb::value_error("regions and piece_bytes differ in length");
    return {addresses.data(), piece_bytes.data(), addresses.shape(0), blocks};
}

u8* pointer(u64 address) { return reinterpret_cast<u8*>(address); }

template <void (*Move)(const Regions&, const std::int64_t*, const Slots&, const std::int64_t*, std::size_t)>
void move(const Ids& addresses, const Ids& piece_bytes, std::int64_t region_blocks, const Ids& blocks, u64 arena,
          u64 slot_stride, std::int64_t num_slots, const Ids& slots) {
    const Regions regions = regions_of(addresses, piece_bytes, region_blocks);
    const Slots host{pointer(arena), std::size_t(slot_stride), num_slots};
    const std::size_t n = blocks.shape(0);
    if (slots.shape(0) != n) throw nb::value_error("blocks and slots differ in length");
    const nb::gil_scoped_release released;
    require_blocks(regions, blocks.data(), n);
    require_slots(regions, host, slots.data(), n);
    Move(regions, blocks.data(), host, slots.data(), n);
}

void touch_pages(u64 address, u64 nbytes) {
    const nb::gil_scoped_release released;
    touch(pointer(address), std::size_t(nbytes));
}

void copy_bytes(u64 dst, u64 src, u64 nbytes) {
    const nb::gil_scoped_release released;
    std::memcpy(pointer(dst), pointer(src), std::size_t(nbytes));
}

const Key* require_keys(const nb::bytes& keys, const Ids& blocks) {
    if (keys_in(keys) != blocks.shape(0)) throw nb::value_error("blocks and keys differ in length");
    return reinterpret_cast<const Key*>(keys.c_str());
}

void fill(const Ids& addresses, const Ids& piece_bytes, std::int64_t region_blocks, const Ids& blocks, const nb::bytes& keys) {
    const Regions regions = regions_of(addresses, piece_bytes, region_blocks);
    const Key* names = require_keys(keys, blocks);
    const nb::gil_scoped_release released;
    require_blocks(regions, blocks.data(), blocks.shape(0));
    fill_blocks(regions, blocks.data(), names, blocks.shape(0));
}

nb::list check(const Ids& addresses, const Ids& piece_bytes, std::int64_t region_blocks, const Ids& blocks,
               const nb::bytes& keys) {
    const Regions regions = regions_of(addresses, piece_bytes, region_blocks);
    const Key* names = require_keys(keys, blocks);
    return to_list(without_gil(true, [&] {
        require_blocks(regions, blocks.data(), blocks.shape(0));
        return check_blocks(regions, blocks.data(), names, blocks.shape(0));
    }));
}

}  // namespace

void bind_copy(nb::module_& module) {
    module.def("gather", &move<gather>, "regions"_a, "piece_bytes"_a, "region_blocks"_a, "blocks"_a, "arena"_a,
               "slot_stride"_a, "num_slots"_a, "slots"_a);
    module.def("scatter", &move<scatter>, "regions"_a, "piece_bytes"_a, "region_blocks"_a, "blocks"_a, "arena"_a,
               "slot_stride"_a, "num_slots"_a, "slots"_a);
    module.def("touch", &touch_pages, "address"_a, "nbytes"_a);
    module.def("copy_bytes", &copy_bytes, "dst"_a, "src"_a, "nbytes"_a);
    module.def("fill_blocks", &fill, "regions"_a, "piece_bytes"_a, "region_blocks"_a, "blocks"_a, "keys"_a);
    module.def("check_blocks", &check, "regions"_a, "piece_bytes"_a, "region_blocks"_a, "blocks"_a, "keys"_a);
}

}  // namespace kvactors
