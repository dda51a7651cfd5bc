// The Python module: constants, the key chain and the registration of everything else.
#include "bindings.hpp"
#include "reader.hpp"
#include "sha256.hpp"

using namespace nb::literals;

namespace kvactors {
namespace {

nb::bytes chain_keys(const nb::bytes& parent, nb::handle tokens, std::int64_t block_size) {
    if (block_size < 1 || block_size > (1 << 20)) throw nb::value_error("block_size must be from 1 to 2**20");
    Path path{u32(block_size), key_of(parent, "parent")};
    read_integers(tokens, path.tokens, "token id");
    without_gil(path.tokens.size() >= kReleaseTokens, [&] { path.name_to(path.full_blocks()); });
    return to_bytes(path.names.data(), 32 * path.names.size());
}

}  // namespace
}  // namespace kvactors

NB_MODULE(_native, m) {
    using namespace kvactors;
    m.doc() = "Block tree, key chain and block copies.";
    m.attr("KEY_BYTES") = 32;
    m.attr("DEVICE") = int(kDevice);
    m.attr("HOST") = int(kHost);
    m.attr("LOADING") = int(kLoading);
    m.attr("OFFLOADING") = int(kOffloading);
    m.def("sha256_accelerated", &sha256_accelerated);
    m.def("chain_keys", &chain_keys, "parent"_a, "tokens"_a, "block_size"_a);
    bind_path(m);
    bind_tree(m);
    bind_copy(m);
}
