# Fetches, patches and configures llama.cpp.

set(DSPINE_LLAMA_DIR "${CMAKE_BINARY_DIR}/llama.cpp")

# What a person gets: the programs of llama.cpp that DSpine concerns.
set(DSPINE_PROGRAMS
    llama-server llama-cli llama-bench llama-quantize llama-speculative-simple)

# Runs native/prepare_upstream.py; stops the configuration when it fails.
function(dspine_prepare_upstream)
    find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)
    set(script "${CMAKE_CURRENT_SOURCE_DIR}/native/prepare_upstream.py")
    set(pin_file "${CMAKE_CURRENT_SOURCE_DIR}/native/pin.json")
    # The glob is checked at every build, so an added hook is noticed too.
    file(GLOB hooks CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/native/hooks/*.patch")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
        "${script}" "${pin_file}" ${hooks})
    execute_process(
        COMMAND "${Python3_EXECUTABLE}" "${script}" --build-dir "${CMAKE_BINARY_DIR}"
        OUTPUT_VARIABLE line
        ERROR_VARIABLE problem
        RESULT_VARIABLE status
        OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "llama.cpp could not be prepared\n${problem}")
    endif()
    message(STATUS "dspine: llama.cpp from ${line}")

    file(READ "${pin_file}" pin)
    string(REGEX MATCH "\"llama_cpp_commit\": *\"([0-9a-f]+)\"" _ "${pin}")
    set(DSPINE_PIN_COMMIT "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

# Adds llama.cpp as a subdirectory from which only what we name is built.
macro(dspine_add_upstream)
    set(BUILD_SHARED_LIBS ON CACHE BOOL "Shared libraries; the Python package loads them")
    set(LLAMA_BUILD_COMMON ON CACHE BOOL "" FORCE)
    set(LLAMA_BUILD_TOOLS ON CACHE BOOL "" FORCE)
    set(LLAMA_BUILD_SERVER ON CACHE BOOL "" FORCE)
    set(LLAMA_BUILD_EXAMPLES ON CACHE BOOL "" FORCE)
    set(LLAMA_BUILD_TESTS OFF CACHE BOOL "" FORCE)
    set(LLAMA_BUILD_APP OFF CACHE BOOL "" FORCE)
    # Upstream would fetch a ready-made UI, or run npm, in the middle of a build. Here nothing
    # but the pin is fetched; `make ui` puts a UI where upstream looks first.
    set(LLAMA_USE_PREBUILT_UI OFF CACHE BOOL "" FORCE)
    set(LLAMA_BUILD_UI OFF CACHE BOOL "" FORCE)
    set(GGML_CCACHE OFF CACHE BOOL "")
    dspine_find_openssl()

    # There is no repository to ask, so `llama-server --version` says what the pin says.
    set(LLAMA_BUILD_NUMBER 0)
    set(LLAMA_BUILD_COMMIT "${DSPINE_PIN_COMMIT}-dspine")

    add_subdirectory("${DSPINE_LLAMA_DIR}" "${CMAKE_BINARY_DIR}/upstream" EXCLUDE_FROM_ALL)
    add_custom_target(dspine-programs ALL)
    add_dependencies(dspine-programs ${DSPINE_PROGRAMS})
    dspine_unversion_libraries("${DSPINE_LLAMA_DIR}")
endmacro()

macro(dspine_find_openssl)
    find_package(OpenSSL 3.0 QUIET)
    set(LLAMA_OPENSSL ${OPENSSL_FOUND} CACHE BOOL "HTTPS in llama.cpp's programs" FORCE)
endmacro()

# A wheel cannot hold symbolic links: libllama.so, .so.0 and .so.0.5.0 would be three copies.
# Upstream's headers are not installed, so the lists that ask for it are emptied as well.
function(dspine_unversion_libraries directory)
    get_property(targets DIRECTORY "${directory}" PROPERTY BUILDSYSTEM_TARGETS)
    foreach(target IN LISTS targets)
        get_target_property(type ${target} TYPE)
        if(type STREQUAL "SHARED_LIBRARY")
            foreach(property IN ITEMS VERSION SOVERSION PUBLIC_HEADER PRIVATE_HEADER)
                set_property(TARGET ${target} PROPERTY ${property})
            endforeach()
        endif()
    endforeach()
    get_property(children DIRECTORY "${directory}" PROPERTY SUBDIRECTORIES)
    foreach(child IN LISTS children)
        dspine_unversion_libraries("${child}")
    endforeach()
endfunction()

# The choices a person may wonder about later: printed, and kept for the next run to print.
function(dspine_report)
    set(choices "backend ${DSPINE_BACKEND} (${DSPINE_BACKEND_REASON})")
    if(LLAMA_OPENSSL)
        list(APPEND choices "HTTPS in the programs: yes, OpenSSL ${OPENSSL_VERSION}")
    else()
        list(APPEND choices "HTTPS in the programs: no, OpenSSL 3 headers not found")
    endif()
    if(EXISTS "${DSPINE_LLAMA_DIR}/tools/ui/dist/index.html")
        list(APPEND choices "web UI: built from the pinned source")
    else()
        list(APPEND choices "web UI: left out (make ui builds it)")
    endif()
    foreach(choice IN LISTS choices)
        message(STATUS "dspine: ${choice}")
    endforeach()
    list(REMOVE_AT choices 2)
    list(JOIN choices "\n" text)
    file(WRITE "${CMAKE_BINARY_DIR}/dspine-choices.txt" "${text}\n")
endfunction()
