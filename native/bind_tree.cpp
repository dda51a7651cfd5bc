#include "bindings.hpp"

using namespace nanobind::literals;

namespace kvactors {
namespace {

void make_tree(PyTree* self, std::int64_t block_size, std::int64_t capacity) {
    if (block_size < 1 || block_size > (1 << 20)) throw nb::value_error("block_size must be from 1 to 2**20");
    if (capacity < 0 || capacity > (std::int64_t(1) << 31)) throw nb::value_error("capacity must be from 0 to 2**31");
    new (self) PyTree(u32(block_size), std::size_t(capacity));
}

nb::tuple match_result(const Match& match) { return nb::make_tuple(match.device_run, to_bytes(match.states)); }

nb::tuple pin(PyTree& self, PyPath& held_by, std::int64_t max_blocks) {
    Use tree(self);
    Use path(held_by);
    const bool release = path->tokens.size() >= kReleaseTokens;
    return match_result(without_gil(release, [&] { return tree->pin(*path, limit(max_blocks)); }));
}

nb::tuple peek(PyTree& self, const PyPath& asked, std::int64_t max_blocks) {
    Use tree(self);
    Use path(asked);
    const bool release = path->tokens.size() >= kReleaseTokens;
    return match_result(without_gil(release, [&] { return tree->peek(*path, limit(max_blocks)); }));
}

nb::list trim(PyTree& self, PyPath& path, std::int64_t held) {
    return to_list(Use(self)->trim(*Use(path), position(held, "held")));
}

nb::tuple commit(PyTree& self, PyPath& computed, std::int64_t upto) {
    Use tree(self);
    Use path(computed);
    const u32 stop = position(upto, "upto");
    const bool release = std::size_t(stop) * path->block_size >= kReleaseTokens + std::size_t(path->held()) * path->block_size;
    const Committed done = without_gil(release, [&] { return tree->commit(*path, stop); });
    return nb::make_tuple(done.start, done.stop, to_list(done.adopted));
}

nb::list release(PyTree& self, PyPath& path) { return to_list(Use(self)->release(*Use(path))); }

NodeArray begin_load(PyTree& self, PyPath& path, std::int64_t start, std::int64_t stop) {
    return to_array(Use(self)->begin_load(*Use(path), position(start, "start"), position(stop, "stop")));
}

nb::list finish_load(PyTree& self, const Nodes& nodes, std::int64_t good) {
    if (good < 0) throw nb::value_error("good out of range");
    return to_list(Use(self)->finish_load(nodes.data(), nodes.shape(0), std::size_t(good)));
}

u32 settle(PyTree& self, PyPath& path) { return Use(self)->settle(*Use(path)); }

void replace(PyTree& self, PyPath& path, std::int64_t at, std::int64_t block) {
    Use(self)->replace(*Use(path), position(at, "position"), position(block, "device block id"));
}

u64 operation(std::int64_t op) {
    if (op <= 0) throw nb::value_error("operation number must be positive");
    return u64(op);
}

nb::tuple evict(PyTree& self, std::int64_t count, std::int64_t op) {
    if (count < 0) throw nb::value_error("count out of range");
    Evicted evicted = Use(self)->evict(std::size_t(count), operation(op));
    const std::size_t bytes = 32 * evicted.keys.size();
    return nb::make_tuple(to_array(std::move(evicted.nodes)), to_bytes(evicted.keys.data(), bytes),
                          to_bytes(evicted.parents.data(), bytes), to_list(evicted.blocks), to_bytes(evicted.states));
}

nb::tuple finish_offload(PyTree& self, const Nodes& nodes, std::int64_t op, const nb::bytes& on_host) {
    if (on_host.size() != nodes.shape(0)) throw nb::value_error("nodes and on_host differ in length");
    const u8* flags = reinterpret_cast<const u8*>(on_host.c_str());
    const Offloaded done = Use(self)->finish_offload(nodes.data(), nodes.shape(0), operation(op), flags);
    return nb::make_tuple(to_list(done.freed), to_list(done.again));
}

const Key* keys_of(const nb::bytes& keys) { return reinterpret_cast<const Key*>(keys.c_str()); }

std::size_t host_gained(PyTree& self, const nb::bytes& keys) { return Use(self)->host_gained(keys_of(keys), keys_in(keys)); }
std::size_t host_gone(PyTree& self, const nb::bytes& keys) { return Use(self)->host_gone(keys_of(keys), keys_in(keys)); }

bool mark_announced(PyTree& self, PyPath& path, std::int64_t upto) {
    return Use(self)->mark_announced(*Use(path), position(upto, "upto"));
}

nb::list unsaved(PyTree& self, PyPath& path, std::int64_t upto, std::int64_t min_hits) {
    return to_list(Use(self)->unsaved(*Use(path), position(upto, "upto"), limit(min_hits < 0 ? 0 : min_hits)));
}

nb::bytes device_keys(const PyTree& self) {
    const std::vector<Key> keys = Use(self)->device_keys();
    return to_bytes(keys.data(), 32 * keys.size());
}

nb::list paths(const PyTree& self) {
    nb::list result;
    for (const Leaf& leaf : Use(self)->leaves())
        result.append(nb::make_tuple(to_bytes(leaf.tokens.data(), 4 * leaf.tokens.size()),
                                     to_bytes(leaf.keys.data(), 32 * leaf.keys.size()), to_bytes(leaf.states)));
    return result;
}

nb::dict statistics(const PyTree& self) {
    Use tree(self);
    const Statistics counts = tree->statistics();
    nb::dict result;
    result["nodes"] = counts.nodes;
    result["device"] = counts.device;
    result["host"] = counts.host;
    result["evictable"] = counts.evictable;
    result["referenced"] = counts.referenced;
    result["loading"] = counts.loading;
    result["offloading"] = counts.offloading;
    result["bytes"] = tree->bytes();
    return result;
}

}  // namespace

void bind_tree(nb::module_& module) {
    nb::class_<PyTree>(module, "BlockTree")
        .def("__init__", &make_tree, "block_size"_a, "capacity"_a = 0)
        .def_prop_ro("block_size", [](const PyTree& self) { return Use(self)->block_size(); })
        .def_prop_ro("retired", [](const PyTree& self) { return Use(self)->retired(); })
        .def("pin", &pin, "path"_a, "max_blocks"_a = -1)
        .def("peek", &peek, "path"_a, "max_blocks"_a = -1)
        .def("trim", &trim, "path"_a, "held"_a)
        .def("commit", &commit, "path"_a, "upto"_a)
        .def("release", &release, "path"_a)
        .def("begin_load", &begin_load, "path"_a, "start"_a, "stop"_a)
        .def("finish_load", &finish_load, "nodes"_a, "good"_a)
        .def("settle", &settle, "path"_a)
        .def("replace", &replace, "path"_a, "position"_a, "block"_a)
        .def("evict", &evict, "count"_a, "op"_a)
        .def("finish_offload", &finish_offload, "nodes"_a, "op"_a, "on_host"_a)
        .def("host_gained", &host_gained, "keys"_a)
        .def("host_gone", &host_gone, "keys"_a)
        .def("clear_host", [](PyTree& self) { Use(self)->clear_host(); })
        .def("mark_announced", &mark_announced, "path"_a, "upto"_a)
        .def("clear_announced", [](PyTree& self) { Use(self)->clear_announced(); })
        .def("unsaved", &unsaved, "path"_a, "upto"_a, "min_hits"_a)
        .def("retire", [](PyTree& self) { return to_list(Use(self)->retire()); })
        .def("device_keys", &device_keys)
        .def("paths", &paths)
        .def("statistics", &statistics)
        .def("check", [](const PyTree& self) { Use(self)->check(); });
}

}  // namespace kvactors
