// An array of zeros whose memory the kernel provides on first access, so that creating a large one
// costs nothing.
#pragma once

#include <sys/mman.h>

#include <cstdlib>

#include "common.hpp"

namespace kvactors {

template <class T>
class Zeroed {
public:
    Zeroed() = default;
    explicit Zeroed(std::size_t size) : size_(size) {
        if (is_mapped()) {
            void* memory = ::mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            items_ = memory == MAP_FAILED ? nullptr : static_cast<T*>(memory);
        } else {
            items_ = static_cast<T*>(std::calloc(size_ + 1, sizeof(T)));
        }
        if (items_ == nullptr) throw std::bad_alloc();
    }
    Zeroed(const Zeroed&) = delete;
    Zeroed& operator=(const Zeroed&) = delete;
    Zeroed& operator=(Zeroed&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Zeroed() {
        if (items_ == nullptr) return;
        if (is_mapped()) ::munmap(items_, bytes());
        else std::free(items_);
    }

    void swap(Zeroed& other) noexcept {
        std::swap(size_, other.size_);
        std::swap(items_, other.items_);
    }
    void touch() {
        if (size_ != 0) std::memset(static_cast<void*>(items_), 0, bytes());
    }

    T& operator[](std::size_t i) { return items_[i]; }
    const T& operator[](std::size_t i) const { return items_[i]; }
    std::size_t size() const { return size_; }

private:
    std::size_t bytes() const { return size_ * sizeof(T); }
    // The allocator may return used memory and clear it, so large arrays are mapped.
    bool is_mapped() const { return bytes() >= std::size_t(1) << 20; }

    std::size_t size_ = 0;
    T* items_ = nullptr;
};

}  // namespace kvactors
