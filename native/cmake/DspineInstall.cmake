# What goes into the Python package: dspine/native/{lib,bin,include,llama.cpp}.

set(DSPINE_PREFIX "dspine/native")

# Appends to `out` every shared library of this build that `target` needs, itself included.
function(dspine_shared_closure target out)
    set(found ${${out}})
    if(NOT TARGET ${target})
        return()
    endif()
    get_target_property(real ${target} ALIASED_TARGET)
    if(real)
        set(target ${real})
    endif()
    get_target_property(imported ${target} IMPORTED)
    if(imported OR target IN_LIST DSPINE_VISITED)
        return()
    endif()
    list(APPEND DSPINE_VISITED ${target})
    get_target_property(type ${target} TYPE)
    if(type STREQUAL "SHARED_LIBRARY")
        list(APPEND found ${target})
    endif()
    foreach(property IN ITEMS LINK_LIBRARIES INTERFACE_LINK_LIBRARIES)
        if(type STREQUAL "INTERFACE_LIBRARY" AND property STREQUAL "LINK_LIBRARIES")
            continue()
        endif()
        get_target_property(links ${target} ${property})
        foreach(link IN LISTS links)
            dspine_shared_closure("${link}" found)
        endforeach()
    endforeach()
    set(${out} ${found} PARENT_SCOPE)
    set(DSPINE_VISITED ${DSPINE_VISITED} PARENT_SCOPE)
endfunction()

function(dspine_install)
    set(libraries "")
    set(DSPINE_VISITED "")
    foreach(target IN ITEMS ${DSPINE_PROGRAMS} dspine)
        dspine_shared_closure(${target} libraries)
    endforeach()
    # Libraries and programs find each other wherever the package is unpacked.
    set_target_properties(${libraries} PROPERTIES INSTALL_RPATH "$ORIGIN")
    set_target_properties(${DSPINE_PROGRAMS} PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
    install(TARGETS ${libraries}
        LIBRARY DESTINATION "${DSPINE_PREFIX}/lib"
        PUBLIC_HEADER DESTINATION "${DSPINE_PREFIX}/include")
    install(TARGETS ${DSPINE_PROGRAMS} RUNTIME DESTINATION "${DSPINE_PREFIX}/bin")
    # llama.cpp's own converter reads the vocabulary of a Hugging Face target.
    install(FILES "${DSPINE_LLAMA_DIR}/convert_hf_to_gguf.py" "${DSPINE_LLAMA_DIR}/LICENSE"
        native/pin.json DESTINATION "${DSPINE_PREFIX}/llama.cpp")
    install(DIRECTORY "${DSPINE_LLAMA_DIR}/conversion" "${DSPINE_LLAMA_DIR}/gguf-py"
        DESTINATION "${DSPINE_PREFIX}/llama.cpp"
        PATTERN "__pycache__" EXCLUDE PATTERN "tests" EXCLUDE PATTERN "examples" EXCLUDE)
endfunction()
