// Stored keys and values: tensors of numbers, or of codes and their scales.
#pragma once
#include "common.h"

// The format that pages of keys and values of D elements have by their dtypes, and their scales' presence.
inline kvc_format format_of(const Tensor& k_pages, const Tensor& v_pages, const std::optional<Tensor>& key_scales,
                            const std::optional<Tensor>& value_scales) {
    const bool scaled = key_scales.has_value();
    KVC_CHECK(scaled == value_scales.has_value(), "key_scales and value_scales must come together");
    if (k_pages.scalar_type() != ScalarType::Char) {
        const kvc_dtype dtype = dtype_of(k_pages, "k_pages without scales");
        KVC_CHECK(!scaled, "key_scales are of codes: k_pages must be int8 with them");
        KVC_CHECK(v_pages.scalar_type() == k_pages.scalar_type(), "v_pages must have the dtype of k_pages");
        return static_cast<kvc_format>(dtype);
    }
    KVC_CHECK(scaled, "k_pages of int8 codes need key_scales and value_scales");
    if (v_pages.scalar_type() == ScalarType::Char) return KVC_FORMAT_INT8;
    KVC_CHECK(v_pages.scalar_type() == ScalarType::Byte,
              "v_pages must be int8 (8 bits) or uint8 (two values of 4 bits) beside int8 k_pages");
    return KVC_FORMAT_K8V4;
}

// Contiguous [pages, P, D] of keys and values, of k8v4 [pages, P, D/2] of values, with scales [pages, P]; sizes of -1 free.
inline kvc_rows rows_of(const Tensor& k_pages, const Tensor& v_pages, const std::optional<Tensor>& key_scales,
                        const std::optional<Tensor>& value_scales, const Tensor& like, int64_t pages, int64_t value_pages,
                        int64_t D) {
    const kvc_format format = format_of(k_pages, v_pages, key_scales, value_scales);
    check_array(k_pages, like, k_pages.scalar_type(), {pages, -1, D}, "k_pages");
    const int64_t P = k_pages.size(1);
    KVC_CHECK(format != KVC_FORMAT_K8V4 || D % 2 == 0, "v_pages of 4 bits need an even head dim, got ", D);
    check_array(v_pages, like, v_pages.scalar_type(), {value_pages, P, format == KVC_FORMAT_K8V4 ? D / 2 : D}, "v_pages");
    kvc_rows rows = {const_cast<void*>(k_pages.const_data_ptr()), const_cast<void*>(v_pages.const_data_ptr()), nullptr,
                     nullptr, format};
    if (!key_scales.has_value()) return rows;
    check_array(*key_scales, like, ScalarType::Half, {k_pages.size(0), P}, "key_scales");
    check_array(*value_scales, like, ScalarType::Half, {v_pages.size(0), P}, "value_scales");
    rows.key_scales = const_cast<void*>(key_scales->const_data_ptr());
    rows.value_scales = const_cast<void*>(value_scales->const_data_ptr());
    return rows;
}

// The same of rows that an op appends to.
inline kvc_rows changed_rows_of(Tensor& k_pages, Tensor& v_pages, std::optional<Tensor>& key_scales,
                                std::optional<Tensor>& value_scales, const Tensor& like, int64_t pages, int64_t D) {
    kvc_rows rows = rows_of(k_pages, v_pages, key_scales, value_scales, like, pages, pages, D);
    rows.keys = k_pages.mutable_data_ptr(), rows.values = v_pages.mutable_data_ptr();
    if (!key_scales.has_value()) return rows;
    rows.key_scales = key_scales->mutable_data_ptr(), rows.value_scales = value_scales->mutable_data_ptr();
    return rows;
}
