#include "bindings.hpp"
#include "reader.hpp"

using namespace nanobind::literals;

namespace kvactors {
namespace {

void make_path(PyPath* self, std::int64_t block_size, const nb::bytes& root) {
    if (block_size < 1 || block_size > (1 << 20)) throw nb::value_error("block_size must be from 1 to 2**20");
    new (self) PyPath(u32(block_size), key_of(root, "root"));
}

// Checks a range of blocks against how many there are.
std::pair<u32, u32> range(std::int64_t start, std::int64_t stop, std::size_t end) {
    if (start < 0 || stop < start || std::size_t(stop) > end) throw nb::value_error("range of blocks out of bounds");
    return {u32(start), u32(stop)};
}

void extend(PyPath& self, nb::handle tokens) {
    Use path(self);
    read_integers(tokens, path->tokens, "token id");
}

void set_extra(PyPath& self, std::int64_t block, const nb::bytes& extra) {
    Use(self)->set_extra(position(block, "block"), std::string(extra.c_str(), extra.size()));
}

nb::bytes tokens(const PyPath& self, std::int64_t start, std::int64_t stop) {
    Use path(self);
    const auto [from, to] = range(start, stop, path->full_blocks());
    return to_bytes(path->block_tokens(from), 4 * std::size_t(to - from) * path->block_size);
}

nb::bytes keys(PyPath& self, std::int64_t start, std::int64_t stop) {
    Use path(self);
    const auto [from, to] = range(start, stop, path->full_blocks());
    const std::size_t missing = to > path->names.size() ? to - path->names.size() : 0;
    without_gil(missing * path->block_size >= kReleaseTokens, [&, last = to] { path->name_to(last); });
    return to_bytes(path->names.data() + from, 32 * std::size_t(to - from));
}

nb::list blocks(const PyPath& self, std::int64_t start, std::int64_t stop) {
    Use path(self);
    const auto [from, to] = range(start, stop == -1 ? std::int64_t(path->table.size()) : stop, path->table.size());
    return to_list(path->table.data() + from, to - from);
}

void assign(PyPath& self, std::int64_t start, nb::handle blocks) {
    Use path(self);
    Raw<u32> ids;
    read_integers(blocks, ids, "device block id");
    path->assign(position(start, "start"), ids.data(), ids.size());
}

bool is_shared(const PyPath& self, std::int64_t at) {
    Use path(self);
    if (at < 0 || std::size_t(at) >= path->shared.size()) throw nb::value_error("position beyond the end of the block table");
    return path->shared[std::size_t(at)] != 0;
}

template <class F>
auto reading(F read) {
    return [read](const PyPath& self) { return read(*Use(self)); };
}

}  // namespace

void bind_path(nb::module_& module) {
    nb::class_<PyPath>(module, "Path")
        .def("__init__", &make_path, "block_size"_a, "root"_a)
        .def_prop_ro("block_size", reading([](Path& p) { return p.block_size; }))
        .def_prop_ro("root", reading([](Path& p) { return to_bytes(p.root.bytes, 32); }))
        .def_prop_ro("num_tokens", reading([](Path& p) { return p.tokens.size(); }))
        .def_prop_ro("num_full_blocks", reading([](Path& p) { return p.full_blocks(); }))
        .def_prop_ro("num_held", reading([](Path& p) { return p.held(); }))
        .def_prop_ro("num_committed", reading([](Path& p) { return p.committed; }))
        .def_prop_ro("num_blocks", reading([](Path& p) { return p.table.size(); }))
        .def("extend", &extend, "tokens"_a)
        .def("set_extra", &set_extra, "block"_a, "extra"_a)
        .def("tokens", &tokens, "start"_a, "stop"_a)
        .def("keys", &keys, "start"_a, "stop"_a)
        .def("blocks", &blocks, "start"_a = 0, "stop"_a = -1)
        .def("assign", &assign, "start"_a, "blocks"_a)
        .def("is_shared", &is_shared, "position"_a);
}

}  // namespace kvactors
